"""Mixture-of-experts layers: `options.py` describes them to Megatron, `routing.py` observes and balances their routers.

`grouped.py` computes them together on GPUs; `sharing.py` divides them among the ranks of an engine.
"""
