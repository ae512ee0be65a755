"""Tables of rows that people bring: where they lie, and in which order they come."""
