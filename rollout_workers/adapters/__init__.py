"""Agents and environments that were written for something else, as agents of ours. docs/adapters has a page for each.

None of their libraries is imported before an agent that needs it is made.
"""

from rollout_workers.adapters.endpoint import EndpointAgent, openai_agent
from rollout_workers.adapters.function import Client, function_agent
from rollout_workers.adapters.trl import trl_rewards

__all__ = ["Client", "EndpointAgent", "function_agent", "openai_agent", "trl_rewards"]
