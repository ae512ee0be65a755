"""The only package that imports megatron-core: `model.py` first; then engine/ (sampling), attention/, parameters/,
huggingface/.
"""
