"""Adapters for agents and environments written for other libraries: docs/adapters has a page for each.

Their libraries are imported when an agent that needs them is made.
"""

from rollout_workers.adapters.endpoint import EndpointAgent, openai_agent
from rollout_workers.adapters.function import Client, function_agent
from rollout_workers.adapters.trl import trl_rewards

__all__ = ["Client", "EndpointAgent", "function_agent", "openai_agent", "trl_rewards"]
