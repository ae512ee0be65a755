"""Parts of `benchmarks/engine.py`: the host's time of a decode step."""
