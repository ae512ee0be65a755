"""Connections to Redis: `client.py` first, then `connections.py`, `scripts.py` (Lua) and `users.py` (ACL)."""
