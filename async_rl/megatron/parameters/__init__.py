"""Parameters by canonical (layout-independent) names: `table.py` lists them, `full_parameters.py` gathers and loads them."""
