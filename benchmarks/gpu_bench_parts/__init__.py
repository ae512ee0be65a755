"""The measurements of benchmarks/gpu_bench.py, one file each."""
