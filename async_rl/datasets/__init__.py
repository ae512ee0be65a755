"""Tables of examples, JSONL and Parquet: `rows.py` reads them, `order.py` shuffles them reproducibly."""
