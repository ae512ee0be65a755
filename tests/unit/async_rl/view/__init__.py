"""The page of a run: what it reads and how it is reduced."""
