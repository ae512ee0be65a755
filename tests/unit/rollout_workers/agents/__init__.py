"""Built-in agents and environments."""
