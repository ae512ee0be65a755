"""What every warm process has imported; a warning meanwhile is an error."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("error")
    import learner.__main__  # noqa: F401
