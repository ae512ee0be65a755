"""What every buffer promises: the one in memory and the one on every server."""
