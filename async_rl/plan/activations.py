"""Activations and logits of a training step on one rank, counted from what Megatron's local layers and async_rl.megatron save.

What a layer keeps for its backward pass, in numbers per token (q = heads x head_dim, k = kv_heads x head_dim):

                        on a GPU                                 on a CPU, where it differs
    a norm              hidden (input)                           2 hidden in float32 (input, normalised)
    linear_qkv          hidden (input)
    attention           q + 2k (linear_qkv's output, which       2k (keys and values by sequence)
                        the values are a view of)
                        q + k (rotated)                          q (queries by sequence)
                        q (output, linear_proj's input)          2q (output by sequence, and packed)
                        heads in float32 (log-sums)
    norms of q and k    q (copy of the queries), if they are     2q + 2k in float32
                        not plain ones of each head, or with
                        learner.kernels: torch
    a norm, linear_fc1  hidden + hidden, as above
    MLP                 2 ffn (linear_fc1's output)              and ffn (silu of the gate), ffn (the other half), which
                        ffn (product of its halves)              is so on a GPU too if the activation is not SwiGLU, or with
                                                                 learner.kernels: torch
    expert's MLP        the same and ffn (the weighted product), and hidden (input), for each expert of a token

All layers share the cosines and sines of a row, 2 head_dim. With context parallelism a rank keeps copies of all keys and values
of its rows for its part of the queries, and 4 head_dim for each layer.

The highest moment is one of two: the backward pass of the output layer, with a chunk of logits; or that of the last layer,
highest in its MLP, where a GPU also has the gradients of a matrix of all experts (experts/grouped.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.config.learner import UpdatesConfig
from async_rl.models.shape import ModelShape

FLOAT = 4
BUFFERS = 3
"""For this many float32 numbers per entry of the vocabulary a chunk of logits is cut (heads/chunked_logits.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """How the ranks compute a model."""

    learner: UpdatesConfig
    element: int
    """Bytes of a number in the layers."""
    tokens: int
    """Tokens of a packed row."""
    on_cpu: bool

    @property
    def has_kernels(self) -> bool:
        """Whether Triton's kernels are in use, which keep less for the backward pass."""
        return not self.on_cpu and self.learner.kernels == "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes at the highest moment of a rank's forward and backward passes."""

    layers: float
    """What layers keep; and what a layer's backward pass takes, if that is the highest moment."""
    logits: float
    """A chunk of logits with its gradients; 0 if another moment is higher."""

    @property
    def total(self) -> float:
        return self.layers + self.logits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Bytes per token of a rank."""

    kept: float
    mlp: float
    """The part of `kept` that selective recomputation does not keep."""
    entry: float
    """The input, all that full recomputation keeps."""
    backward: float
    """What the backward pass needs in addition."""

    def kept_with(self, recompute: str) -> float:
        return {"none": self.kept, "selective": self.kept - self.mlp, "full": self.entry}[recompute]

    def highest(self, recompute: str) -> float:
        """What one layer takes during its backward pass, beside what every layer keeps."""
        return self.backward + {"none": 0.0, "selective": self.mlp, "full": self.kept}[recompute]


def activations(shape: ModelShape, compute: Compute, *, stage: int) -> Activations:
    """Return the highest moment of an update on a rank of the pipeline stage."""
    parallel, recompute, element = compute.learner.parallel, compute.learner.recompute, compute.element
    own = -(-compute.tokens // parallel.context)
    layers = [_layer(shape, number, compute) for number in range(shape.layers)]
    per_chunk = sum(layer.kept_with(recompute) for layer in layers) / (parallel.pipeline * parallel.virtual_stages)
    rotations = element * 2 * shape.head_dim if parallel.context == 1 else 0
    kept = own * (per_chunk + rotations) * _rows_in_flight(compute, stage)
    going_back = own * max(layer.highest(recompute) for layer in layers) + _gradients_of_experts(shape, compute)

    moments = [Activations(layers=kept + going_back, logits=0.0)]
    if stage == parallel.pipeline - 1:
        last = own * (_norm(_width(shape, compute), compute) + element * _width(shape, compute))
        moments.append(Activations(layers=kept + last, logits=_logits(shape, compute)))
    return max(moments, key=lambda moment: moment.total)


def _rows_in_flight(compute: Compute, stage: int) -> int:
    """Return for how many rows a chunk of layers keeps activations: the depth of Megatron's 1F1B schedules."""
    parallel = compute.learner.parallel
    if parallel.virtual_stages == 1:
        return parallel.pipeline - stage
    return 2 * (parallel.pipeline - stage - 1) + (parallel.virtual_stages - 1) * parallel.pipeline + 1


def _logits(shape: ModelShape, compute: Compute) -> float:
    """Return the bytes of the highest moment in the output layer's backward pass."""
    element, own = compute.element, -(-compute.tokens // compute.learner.parallel.context)
    if shape.head == "scalar":
        return own * 2 * FLOAT * shape.hidden  # the value head computes in float32
    columns = -(-shape.vocab_size // compute.learner.parallel.tensor)
    rows = max(int(compute.learner.logits_gb * 2**30 / (BUFFERS * FLOAT * columns)), 1)
    of_an_entry = 2 * FLOAT  # logits and log-probabilities, or, where one chunk is kept, log-probabilities and gradients
    gradient, weights = element * own * shape.hidden, element * columns * shape.hidden
    if element != FLOAT and compute.on_cpu:  # which multiplies in float32
        gradient = FLOAT * (2 * own + columns) * shape.hidden
    elif element != FLOAT and own <= rows:
        of_an_entry += element  # the gradient of the logits, rounded
    # later a placeholder for the weights' gradient, which was added to the buffer in float32
    return gradient + max(of_an_entry * columns * min(own, rows), 0.0 if shape.tied_embeddings else weights)


def _width(shape: ModelShape, compute: Compute) -> float:
    """Return the hidden numbers of a token on a rank, between the matrices that tensor ranks divide."""
    parallel = compute.learner.parallel
    return shape.hidden / (parallel.tensor if parallel.sequence else 1)


def _norm(width: float, compute: Compute) -> float:
    return width * (2 * FLOAT if compute.on_cpu else compute.element)


def _layer(shape: ModelShape, number: int, compute: Compute) -> _Layer:
    element, tensor, width = compute.element, compute.learner.parallel.tensor, _width(shape, compute)
    entry = _norm(width, compute)
    mlp, widest = _mlp(shape, number, compute)
    # linear_fc2's backward pass leaves the gradients of the two halves of the MLP beside all that the layer keeps
    backward = element * (2 * widest + 2 * width)
    if compute.learner.parallel.sequence:  # gathered again for the gradients of linear_qkv and linear_fc1
        backward += element * (shape.hidden + shape.hidden / tensor)
    return _Layer(
        kept=2 * (entry + element * width) + _attention(shape, compute) + mlp,
        mlp=mlp,
        entry=element * width,
        backward=backward,
    )


def _gradients_of_experts(shape: ModelShape, compute: Compute) -> float:
    """Return the bytes of the gradients of linear_fc1 of all experts of a rank's layer, which a GPU computes at once."""
    experts, together = shape.experts, shape.activation == "silu" and not compute.on_cpu and compute.element != FLOAT
    if experts is None or not together:
        return 0.0
    return compute.element * experts.number / compute.learner.parallel.expert * 2 * experts.ffn * shape.hidden


def _attention(shape: ModelShape, compute: Compute) -> float:
    element, parallel = compute.element, compute.learner.parallel
    queries, keys = (heads * shape.head_dim / parallel.tensor for heads in (shape.heads, shape.kv_heads))
    mixed = element * (queries + 2 * keys)
    always = element * 2 * queries + FLOAT * shape.heads / parallel.tensor
    # one kernel norms and rotates heads, unless the norm is of another kind
    has_norms_apart = shape.qk_norm and (not compute.has_kernels or shape.qk_norm_over != "head" or shape.centered_norms)
    copied = element * queries if has_norms_apart else 0.0
    if parallel.context > 1:
        always += element * (4 * shape.head_dim + queries + 2 * keys * parallel.context)
        return always + copied + (mixed if shape.qk_norm else 0.0)
    if not compute.on_cpu:
        return always + copied + mixed + element * keys
    by_sequence = element * (queries + 2 * keys)
    if not shape.qk_norm:
        return always + by_sequence
    # in float32 the keys' norm keeps a view of linear_qkv's output, else a copy of the keys
    of_norms = 2 * FLOAT * queries + FLOAT * keys + (mixed if element == FLOAT else FLOAT * keys)
    return always + by_sequence + of_norms


def _mlp(shape: ModelShape, number: int, compute: Compute) -> tuple[float, float]:
    """Return the bytes per token that the MLP keeps besides its input, and its width."""
    experts, element, tensor = shape.experts, compute.element, compute.learner.parallel.tensor
    kept = 3 if shape.activation == "silu" and compute.has_kernels else 5
    if experts is None or number not in experts.layers:
        return element * kept * shape.ffn / tensor, shape.ffn / tensor
    # sequence parallelism gives every tensor rank its own tokens; the ranks of a stage exchange equal numbers of them
    shared = experts.per_token / (tensor if compute.learner.parallel.sequence else 1)
    own = shape.shared_ffn / tensor
    return element * (shared * ((kept + 1) * experts.ffn + shape.hidden) + kept * own), shared * experts.ffn + own
