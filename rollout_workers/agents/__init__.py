"""Agents to subclass: each poses tasks and plays episodes around a model. `reward_only.py` first."""

from async_rl.imports.old_names import old_names
from rollout_workers.agents.contrastive import BestAndWorstAgent, TwoPromptsAgent
from rollout_workers.agents.dataset import DatasetAgent
from rollout_workers.agents.environment import Environment
from rollout_workers.agents.games import Game, HeadToHeadAgent, SelfPlayAgent
from rollout_workers.agents.group_reward import GroupRewardAgent
from rollout_workers.agents.multi_task import MultiTaskMember, WeightedMultiTask, multi_task
from rollout_workers.agents.pass_at import PassAtEvaluationAgent
from rollout_workers.agents.reward_only import RewardOnlyAgent
from rollout_workers.agents.tool_agent import ToolAgent
from rollout_workers.episodes.rewards import Score

__all__ = [
    "BestAndWorstAgent",
    "DatasetAgent",
    "Environment",
    "Game",
    "GroupRewardAgent",
    "HeadToHeadAgent",
    "MultiTaskMember",
    "PassAtEvaluationAgent",
    "RewardOnlyAgent",
    "Score",
    "SelfPlayAgent",
    "ToolAgent",
    "TwoPromptsAgent",
    "WeightedMultiTask",
    "multi_task",
]

__getattr__ = old_names(__name__)
