"""Metrics, samples, the journal of trained groups, and reports of workers and evaluators."""
