"""Pure decisions of the buffer: `admission.py`, `selection.py`, `recovery.py`. `scripts/` implements the same rules in Lua."""
