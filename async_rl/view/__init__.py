"""The web page of a run (`async-rl view`), read-only: server.py answers requests, run_view.py reads the run's folder."""
