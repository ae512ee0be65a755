"""What the page shows of the recorded events and rollouts."""
