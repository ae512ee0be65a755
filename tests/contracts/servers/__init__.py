"""What the buffer does on servers that are remote, restricted, encrypted, clustered, or that fail."""
