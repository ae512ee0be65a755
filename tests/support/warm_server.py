"""Imports of the server of warm processes. What cannot be imported is named by the tests that import it."""

import traceback

try:
    import tests.support.warm_imports  # noqa: F401
except Exception:
    traceback.print_exc()
