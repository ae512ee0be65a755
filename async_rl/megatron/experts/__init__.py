"""Mixture-of-experts layers: `options.py` describes them to Megatron, `routing.py` observes and balances their routers.

`sharing.py` divides them among the ranks of an engine.
"""
