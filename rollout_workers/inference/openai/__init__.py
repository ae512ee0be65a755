"""Inference over OpenAI's protocol: `backend.py` first."""
