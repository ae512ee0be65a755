"""Updates: the learning-rate schedule, and moments in host memory."""
