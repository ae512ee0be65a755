"""The guard against diverging steps."""
