"""What `learner/losses.py` is made of: each of a policy loss's choices in a file of its own."""
