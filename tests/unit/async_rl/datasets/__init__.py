"""Datasets: which files make a split, how rows are read, filtered and rendered, on disk and from a Hub."""
