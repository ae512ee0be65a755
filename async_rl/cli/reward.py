"""What can be typed after `async-rl reward`."""

from __future__ import annotations

from async_rl.cli.grammar import Option, Tool

SERVE = Tool(
    words="reward serve",
    help="Serve a trained reward model; a dataset names it as its scoring: http://...",
    options=(
        Option(name="checkpoint", value="FOLDER", help="another than the newest of the run"),
        Option(name="host", value="ADDRESS", help="where to listen (127.0.0.1)"),
        Option(name="port", value="PORT", read=int, help="0 takes a free one (0)"),
        Option(name="token-file", value="FILE", help="who asks must know what stands there; required beyond this machine"),
        Option(name="insecure", help="answer anybody who reaches it: the network is private"),
    ),
)
