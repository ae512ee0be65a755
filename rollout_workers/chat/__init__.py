"""Conversations as token rows: replies, tool calls, and the row itself (`token_row.py` first)."""
