"""Tests of learner/pace."""
