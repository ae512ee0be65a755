"""What happens when rollouts say too little about the policy they train: `rule.py` decides, `actions.py` acts."""
