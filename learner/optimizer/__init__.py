"""Updates: the learning-rate schedule, and the optimizer's state in host memory."""
