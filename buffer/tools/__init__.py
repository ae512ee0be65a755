"""What `async-rl buffer VERB` does: one file per verb, or per family of verbs. Each is `async def (run, line) -> exit code`."""
