"""Implements `async-rl buffer VERB`, one file per verb or family of verbs; `verbs.py` first.

Each verb is `async def (run, line)` and returns an exit code, or None for 0. They share open_run.py, output.py, find_group.py
and tokens.py.
"""
