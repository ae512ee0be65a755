"""Signatures of what this repository calls in torch, Megatron and Transformer Engine, read from sources. `calls.py` first."""
