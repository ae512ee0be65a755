"""The processes (ranks) that train one model: rank_group.py (rank 0's view of all) first."""
