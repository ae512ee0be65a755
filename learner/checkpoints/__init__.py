"""What the learner remembers: written beside the training, read when it comes back or is asked for an older version."""
