"""The `async-rl` command, one file per noun: `main.py` first, then `grammar.py`."""
