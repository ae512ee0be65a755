"""`async-rl env check`: play an environment before training on it and report its problems. `trials.py` first."""
