"""Rollout groups as bytes (`codec.py` first) and as JSON: what the buffer, the archive and the recorded rollouts store."""
