"""What a model makes of a packed row: hidden states, and the heads that read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from async_rl.megatron.attention.context_parallel import RowShards
from async_rl.megatron.heads.output_layer import OutputLayer
from async_rl.megatron.heads.value_head import ValueHead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedOutput:
    """The output of a chunk of the model for a packed row of [tokens].

    Context ranks have parts of it, in which every token is somewhere; so heads read only their part, and what they compute per
    token is gathered. Tensor ranks have parts of it with sequence parallelism, and then gather hidden states.
    """

    hidden: Tensor
    """[this rank's tokens, hidden] after the last layer. On earlier pipeline stages, what the next stage receives."""
    tokens: int
    output_layer: OutputLayer | None = None
    """None on earlier pipeline stages, and in a model whose only head is the value head."""
    weight: Tensor | None = None
    """The output layer's, [this tensor rank's entries of the vocabulary, hidden]; the embedding's, if they are tied."""
    value_head: ValueHead | None = None
    shards: RowShards | None = None
    """How the row is divided among context ranks. None: it is not."""

    def logits(self) -> Tensor:
        """Compute whole logits in float32, [tokens, this tensor rank's entries]: for small rows. Differentiable."""
        assert self.output_layer is not None
        return self.of_row(self.output_layer(self.hidden, self.weight)[0])

    def values(self) -> Tensor:
        """Compute the value head's number of each token in float32, [tokens]. Differentiable."""
        assert self.value_head is not None
        return self.of_row(self.value_head(self.hidden)[:, 0])

    def for_vocabulary(self) -> tuple[Tensor, Tensor]:
        """Return the hidden states of this context rank's tokens, the same on all tensor ranks, and the output layer's weight.
        The gradient of these hidden states is what each tensor rank's entries contribute.
        """
        assert self.output_layer is not None
        assert self.weight is not None
        return self._own_tokens(self.output_layer.entered(self.hidden)), self.weight

    @property
    def vocab_size(self) -> int:
        assert self.output_layer is not None
        return self.output_layer.vocab_size

    @property
    def bytes_at_once(self) -> int:
        """Memory for a chunk of logits."""
        assert self.output_layer is not None
        return self.output_layer.bytes_at_once

    def own_part(self, values: Tensor, *, filler: float) -> Tensor:
        """Return the part of one value per token that belongs to `for_vocabulary`."""
        return values if self.shards is None else self.shards.shard(values, filler=filler)

    def of_row(self, own: Tensor) -> Tensor:
        """Gather one value per token of this rank to those of the row. All context ranks must compute the same from them."""
        return self._own_tokens(own) if self.shards is None else self.shards.without_padding(own)

    def _own_tokens(self, padded: Tensor) -> Tensor:
        return padded if self.shards is not None else padded[: self.tokens]
