"""Tests of the recorded events and rollouts."""
