"""The processes (ranks) that train one model: rank_group.py first."""
