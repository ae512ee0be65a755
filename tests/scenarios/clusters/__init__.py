"""Fleets on schedulers and on several hosts, which are made on this machine and need root."""
