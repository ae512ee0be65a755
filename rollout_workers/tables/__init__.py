"""Tables of problems: where their rows lie, and in which order they are posed."""
