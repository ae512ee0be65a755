"""When versions are pushed to the workers, and operators' requests about them: publish.py first."""
