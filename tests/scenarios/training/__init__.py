"""`async-rl train` and reward models on small models."""
