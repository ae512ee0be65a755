"""Datasets of examples: `rows.py` reads JSONL, Parquet and Hugging Face datasets, `order.py` shuffles reproducibly."""
