"""Inference with transformers: `engine.py`, the engine of `worker.backend: hf`; `folder_model.py`, a folder for policies."""
