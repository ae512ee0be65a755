"""`async-rl audit`: whether Redis, journal, checkpoints and archive of a run tell one story. Begin with rules.py.

evidence.py   reads each of the four, changing none      rules.py   pure: what contradicts, one sentence each
page.py       a table for people, JSON for programs      __main__.py   the process
"""
