"""Messages between a run's processes over its Redis: inbox.py first; requests, reports, the mix of environments. Data only."""
