"""Backends and replicas, without a model."""
