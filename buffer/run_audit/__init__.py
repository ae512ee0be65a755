"""`async-rl audit`: checks Redis, journal, checkpoints and archive of a run against each other. Read rules.py first.

evidence.py   reads the four, changing none              rules.py   pure: the checks, one sentence per contradiction
page.py       prints a table or JSON                     __main__.py   the process
"""
