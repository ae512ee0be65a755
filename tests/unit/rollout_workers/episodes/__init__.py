"""One episode, and the environments of a worker."""
