"""Implements `async-rl buffer VERB`, one file per verb or family of verbs; `verbs.py` first.

Each verb is `async def (run, line) -> exit code`. They share open_run.py, output.py, find_group.py and tokens.py.
"""
