"""Tests of the four packages: unit, contracts, scenarios, adapters; what several of them share is in support."""
