"""Environments served from another process, virtual environment or machine: docs/env_tools.md. `server.py` first.

    worker ── GET  /hello                 which schema, are siblings played together?
           ── GET  /task?index=…          the task
           ══ WS   /play                  one episode, or one group of siblings: the model is asked through the same socket

One socket is one episode (or group); when it closes, the episode ends on both sides.
"""
