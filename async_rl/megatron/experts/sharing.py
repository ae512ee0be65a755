"""Tokens and experts in an engine, whose ranks all hold the same tokens.

Each rank computes its own experts for all tokens, and the ranks add their outputs up. Nothing is dispatched, and nothing is
computed twice. Megatron's dispatchers would send every rank's copy of a token, and let the host wait for numbers of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from async_rl.megatron import host
from async_rl.megatron.compat import GPTModel
from async_rl.megatron.parallel import all_reduced

with host.importing():
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


def share_tokens(model: GPTModel) -> None:
    """Give each layer the tokens of the experts that this rank has. For inference only: there is no backward pass."""
    # else Megatron's engine would allocate buffers for dispatchers of its own, on a GPU
    vars(model.config)["inference_moe_token_dispatcher_type"] = "none"
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            has_all = layer.config.expert_model_parallel_size == 1
            layer.token_dispatcher = AllTokens(layer) if has_all else SharedTokens(layer)


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
        tokens = self._chosen.nonzero()[:, 1]  # expert after expert
        # other ranks have the rest of a token's experts; what they give it is here a row of zeros behind all others
        self._note_rows(self._chosen.reshape(-1).cumsum(0) - 1, missing=len(tokens))
        return hidden_states[tokens], self._chosen.sum(dim=1), probs[self._chosen]

    def _note_rows(self, rows: Tensor, *, missing: int) -> None:
        """Find for each token the rows that its experts will compute. `rows`: of each choice, `missing`: of those that lack."""
        columns = self._chosen.cumsum(0) * self._chosen  # a token's experts from 1 on; column 0 is for all others
        shape = self._chosen.shape[1], self.config.moe_router_topk + 1
        self._rows = rows.new_full(shape, missing).scatter_(1, columns.T, rows.view_as(self._chosen).T)[:, 1:]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return self._added_up(functional.pad(hidden_states, (0, 0, 0, 1)))

    def _added_up(self, outputs: Tensor) -> Tensor:
        """Add what each token's experts have computed: in their order, in float32, rounded once."""
        return outputs[self._rows].sum(dim=1, dtype=torch.float32).to(outputs.dtype)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return all_reduced(hidden_states, self.ep_group)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self._shape)


class AllTokens(SharedTokens):
    """The same on a rank that has all experts. Every token has chosen the same number of them, so the host knows all sizes,
    and a CUDA graph can hold the layer if the experts are computed together.
    """

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        choices, tokens = self._chosen.reshape(-1), self._chosen.shape[1]
        taken, rows = tokens * self.config.moe_router_topk, choices.cumsum(0) - 1
        self._note_rows(rows, missing=0)  # nothing lacks
        places = torch.where(choices, rows, taken)  # what is not chosen goes behind
        order = places.new_empty(taken + 1).scatter_(0, places, torch.arange(len(choices), device=places.device))[:taken]
        return hidden_states[order % tokens], self._chosen.sum(dim=1), probs.reshape(-1)[order]

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return self._added_up(hidden_states)
