"""Kills, stops and disconnects the ends of the weight wire and looks for torn or older weights; start with run.py."""
