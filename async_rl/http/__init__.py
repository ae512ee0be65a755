"""HTTP servers of the processes: server.py listens on one address, for clients that know a token."""
