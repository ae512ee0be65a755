"""A private Redis for runs that are given none: `server.py` first."""
