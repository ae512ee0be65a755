"""Expert parallelism in an engine, whose ranks all hold the same tokens.

Each rank computes its own experts for all tokens, and the ranks add their outputs up. Nothing is dispatched, and nothing is
computed twice. Megatron's dispatchers would send every rank's copy of a token.
"""

from __future__ import annotations

from torch import Tensor

from async_rl.megatron import host
from async_rl.megatron.compat import GPTModel
from async_rl.megatron.parallel import all_reduced

with host.importing():
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


def share_tokens(model: GPTModel) -> None:
    """Let the ranks of an engine divide the experts of its layers. For inference only: there is no backward pass."""
    # else Megatron's engine would allocate buffers for dispatchers of its own, on a GPU
    vars(model.config)["inference_moe_token_dispatcher_type"] = "none"
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = SharedTokens(layer)


class SharedTokens(MoETokenDispatcher):
    """Takes the tokens of this rank's experts from those that every rank has."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__(layer.config, get_default_pg_collection())
        first = layer.local_expert_indices[0]
        self._own = slice(first, first + len(layer.local_expert_indices))

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._shape, self._chosen = tokens.shape, routing_map[:, self._own].T
        return tokens.reshape(-1, tokens.shape[-1]), probs[:, self._own].T

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._places = self._chosen.nonzero()[:, 1]  # expert after expert
        return hidden_states[self._places], self._chosen.sum(dim=1).cpu(), probs[self._chosen]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        tokens, width = self._shape[:-1].numel(), self._shape[-1]
        return hidden_states.new_zeros(tokens, width).index_add_(0, self._places, hidden_states)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return all_reduced(hidden_states, self.ep_group)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self._shape)
