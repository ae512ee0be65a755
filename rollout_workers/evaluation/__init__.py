"""How good is a model: episodes of held tasks, counted and estimated, never trained on."""
