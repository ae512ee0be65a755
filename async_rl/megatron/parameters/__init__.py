"""Parameters under layout-free names: `table.py` lists them, `full_parameters.py` gathers and loads them."""
