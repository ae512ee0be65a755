"""The guard against rollouts that are too far from the policy: `rule.py` decides, `actions.py` acts."""
