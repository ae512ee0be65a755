"""The parts of the weight wire."""
