"""The losses: `functions.py` first, with their formulas; then one file per part of the policy loss."""
