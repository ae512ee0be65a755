"""The checks of benchmarks/gpu_check.py, one file each."""
