"""Inference backends: Megatron's engine (`engine.py` first), OpenAI-compatible servers, transformers, scripted answers."""
