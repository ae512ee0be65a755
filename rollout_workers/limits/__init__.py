"""How much runs at once: the worker's concurrency, and limits and circuit breakers of its environments."""
