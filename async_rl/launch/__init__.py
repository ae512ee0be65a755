"""How the processes of a run are started: `commands.py` says with which command, `local.py` runs them on one machine."""
