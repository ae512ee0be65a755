"""The learner on real models: steps, layouts of ranks, checkpoints, critics."""
