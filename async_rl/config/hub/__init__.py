"""Names on the Hugging Face Hub: `snapshot.py` fetches what they stand for, `datasets.py` describes datasets."""
