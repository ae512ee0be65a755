"""async_rl: asynchronous off-policy RL post-training. This package holds the words that the three roles share."""

__version__ = "0.1.0"
