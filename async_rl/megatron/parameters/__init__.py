"""Parameters by canonical (layout-independent) names: `table.py` lists them, `full_parameters.py` loads them into a model."""
