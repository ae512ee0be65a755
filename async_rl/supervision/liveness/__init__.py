"""Heartbeats and deadlines of threads and processes: `watchdog.py` first."""
