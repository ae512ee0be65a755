"""Datasets of examples, here and on the Hub: `opening.py` first, then `files.py` (finds files), `rows.py` (reads them),
`columns.py` (reads a row) and `order.py` (shuffles reproducibly).
"""
