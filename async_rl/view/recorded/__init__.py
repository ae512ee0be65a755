"""What the page shows of the recorded events and rollouts: rollouts.py first; `slowdown.py` says what a run waited for."""
