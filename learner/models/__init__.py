"""`async-rl model`: import, export and inspect."""
