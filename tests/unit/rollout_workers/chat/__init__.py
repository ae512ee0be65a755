"""Chat templates and token rows."""
