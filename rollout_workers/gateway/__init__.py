"""OpenAI-compatible endpoints for episodes, so that an unmodified agent can be the agent: docs/gateway.md."""

from rollout_workers.gateway.server import HttpGateway, open_gateway

__all__ = ["HttpGateway", "open_gateway"]
