"""Messages between the processes of a run, over its Redis: requests, reports, the mix of environments. Data only."""
