"""The private Redis of a run whose `redis.url` is empty: `server.py` first."""
