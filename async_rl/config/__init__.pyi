"""The names of `async_rl.config`, each with its home."""

from async_rl.config.learner import BatchConfig as BatchConfig
from async_rl.config.learner import WireConfig as WireConfig
from async_rl.config.run import ExpertsSize as ExpertsSize
from async_rl.config.run import MetricsConfig as MetricsConfig
from async_rl.config.run import ModelConfig as ModelConfig
from async_rl.config.run import ModelSize as ModelSize
from async_rl.config.run import RunConfig as RunConfig
from async_rl.config.tokenizer import CharacterTokenizer as CharacterTokenizer
from async_rl.config.tokenizer import TokenizerConfig as TokenizerConfig
from async_rl.config.tree import HEARTBEAT_S as HEARTBEAT_S
from async_rl.config.tree import Config as Config
