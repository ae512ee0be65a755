"""From rewards to what is learned: for whole rollouts (with `learner/advantages.py`), and for single tokens."""
