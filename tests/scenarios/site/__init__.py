"""The documentation as `make docs` builds it, in a browser."""
