"""Circuit breakers and the number of groups in flight."""
