"""Advantages of rollouts and of tokens."""
