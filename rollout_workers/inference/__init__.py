"""Backends that sample: Megatron's engine (`engine.py`), OpenAI-compatible servers, transformers, scripts of answers."""
