"""Agents to subclass: each poses tasks and plays episodes around a model. `reward_only.py` first."""

from async_rl.imports.old_names import old_names
from rollout_workers.agents.contrastive import BestAndWorstAgent as BestAndWorstAgent
from rollout_workers.agents.contrastive import TwoPromptsAgent as TwoPromptsAgent
from rollout_workers.agents.dataset import DatasetAgent as DatasetAgent
from rollout_workers.agents.environment import Environment as Environment
from rollout_workers.agents.games import Game as Game
from rollout_workers.agents.games import HeadToHeadAgent as HeadToHeadAgent
from rollout_workers.agents.games import SelfPlayAgent as SelfPlayAgent
from rollout_workers.agents.group_reward import GroupRewardAgent as GroupRewardAgent
from rollout_workers.agents.multi_task import MultiTaskMember as MultiTaskMember
from rollout_workers.agents.multi_task import WeightedMultiTask as WeightedMultiTask
from rollout_workers.agents.multi_task import multi_task as multi_task
from rollout_workers.agents.pass_at import PassAtEvaluationAgent as PassAtEvaluationAgent
from rollout_workers.agents.reward_only import RewardOnlyAgent as RewardOnlyAgent
from rollout_workers.agents.tool_agent import ToolAgent as ToolAgent
from rollout_workers.episodes.rewards import Score as Score

__getattr__ = old_names(__name__)
