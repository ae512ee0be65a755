"""How much runs at once: concurrency of the worker, limits and circuit breakers of its environments."""
