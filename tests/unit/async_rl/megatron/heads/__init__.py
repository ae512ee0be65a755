"""Heads: log-probabilities, entropies and divergences from hidden states, against whole logits in float64."""
