"""From groups to the rows that ranks compute with. Which sequence goes where: `learner/packing/planner.py`."""
