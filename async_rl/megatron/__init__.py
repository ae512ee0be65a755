"""The only door to Megatron: `model.py` first. `engine/` samples, `attention/` computes, `parameters/` names the weights."""
