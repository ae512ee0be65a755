"""Sides and cases of benchmarks/packing.py."""
