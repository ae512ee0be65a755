"""The repository itself: its tree, pages, packages, public names and benchmarks."""
