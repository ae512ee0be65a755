"""Sides and workloads of benchmarks/buffer_speed.py."""
