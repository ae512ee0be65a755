"""The configuration tree, its files and command line."""
