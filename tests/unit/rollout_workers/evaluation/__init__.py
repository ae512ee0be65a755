"""Evaluations and their estimates."""
