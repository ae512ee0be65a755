"""Conversations as rows of tokens: replies, tool calls, and the row of what was sampled."""
