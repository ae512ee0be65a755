"""Says whether a machine is fit for a run: `verdict.py` first. Each other file has one subject: its facts, how they are
gathered, and the pure decision over them.
"""
