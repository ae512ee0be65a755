"""Sides and processes of benchmarks/weights.py."""
