"""Environments checked, served, attached, and hostile ones beside good ones."""
