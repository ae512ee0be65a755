"""Losses and objectives."""
