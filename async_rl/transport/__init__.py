"""The weight wire: versioned full weights from the learner's rank 0 to an elastic set of workers (docs/weights.md)."""
