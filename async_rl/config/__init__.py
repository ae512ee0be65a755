"""The typed configuration of a run: `tree.py` first; `loading.py` builds it from YAML files and a command line.

The names are listed in `__init__.pyi` and imported on first use: building all pydantic models takes longer than the rest of
`async-rl --help`.
"""

from async_rl.imports.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
