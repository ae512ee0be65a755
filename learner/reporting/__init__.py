"""What the learner says of its steps and its fleet: metrics, samples, the journal of what was trained."""
