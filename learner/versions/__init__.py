"""When a version goes out to the workers, and what people may ask about it."""
