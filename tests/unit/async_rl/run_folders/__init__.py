"""What is read from the folders of runs, and shown of it."""
