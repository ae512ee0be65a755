"""What people type after `async-rl`: one file per noun. Begin with `main.py`, then `grammar.py`."""
