"""The parts of age_study.py: what is run, what is made of a run, and the page."""
