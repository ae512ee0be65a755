"""The weight wire: versioned weights from the learner's ranks to workers that come and go (docs/weights.md)."""
