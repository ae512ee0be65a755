"""The process of `async-rl view`: __main__.py serves the page, live_run.py reads the run's Redis for it."""
