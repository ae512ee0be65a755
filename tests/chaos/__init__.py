"""Kills writers, learners and servers of a replay buffer and audits what is left; start with run.py."""
