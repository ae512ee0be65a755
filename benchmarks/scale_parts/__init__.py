"""Workers, learner and server of benchmarks/scale.py."""
