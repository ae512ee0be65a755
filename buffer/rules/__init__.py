"""Pure decisions of the buffer: `admission.py`, `selection.py`, `recovery.py`. `scripts/` holds the same rules in Lua."""
