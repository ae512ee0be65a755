"""Environments in a process, a virtual environment or on a machine of their own: docs/env_tools.md.

    worker ── GET  /hello                 which schema, are siblings played together?
           ── GET  /task?index=…          the task
           ══ WS   /play                  one episode, or one group of siblings: the model is asked through the same socket

One socket is one episode: where it ends, the episode ends, on either side.
"""
