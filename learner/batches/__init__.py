"""From groups to the packed rows that ranks compute with: `batch.py` first. The planner: `learner/packing/`."""
