"""Faults in whole runs, each audited; start with run.py, or with soak.py for one long run."""
