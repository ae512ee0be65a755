"""OpenAI-compatible endpoints for episodes, so that unmodified agents can be trained: `server.py` first; docs/gateway.md."""

from rollout_workers.gateway.server import HttpGateway, open_gateway

__all__ = ["HttpGateway", "open_gateway"]
