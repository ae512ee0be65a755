"""Tables of tasks for agents: scoring functions and curricula."""
