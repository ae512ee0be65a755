"""Parts of benchmarks/learner_step.py."""
