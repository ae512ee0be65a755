"""The typed configuration of a run: `tree.py` first; `loading.py` builds it from YAML files and a command line."""

from async_rl.config.tokenizer import CharacterTokenizer, TokenizerConfig
from async_rl.config.tree import (
    HEARTBEAT_S,
    BatchConfig,
    Config,
    ExpertsSize,
    MetricsConfig,
    ModelConfig,
    ModelSize,
    RunConfig,
    WireConfig,
)

__all__ = [
    "HEARTBEAT_S",
    "BatchConfig",
    "CharacterTokenizer",
    "Config",
    "ExpertsSize",
    "MetricsConfig",
    "ModelConfig",
    "ModelSize",
    "RunConfig",
    "TokenizerConfig",
    "WireConfig",
]
