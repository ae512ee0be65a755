"""What reads a model's last hidden states: log-probabilities, entropies, divergences, values. Begin with packed_output.py."""
