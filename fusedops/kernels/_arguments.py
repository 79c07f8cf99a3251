"""The arguments of operators in the order of their schemas, for ops and kernels alike.

Imports no Triton. In sharding rules specs stand for the tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch


class AttentionArguments(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    seed: torch.Tensor | None
    dropout_p: float
    scale: float
    window_left: int
    window_right: int
    softcap: float
    keep_remainder: bool


class VarlenArguments(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    seed: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    scale: float
    window_left: int
    window_right: int
    softcap: float
    keep_remainder: bool


class DeltaRuleArguments(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    scale: float
    qk_norm: bool


class CausalConv1dArguments(NamedTuple):
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    activation: str


class StateSpaceArguments(NamedTuple):
    """Of ``fusedops::selective_state_space``; selective_scan has the same but for the bounds."""

    input: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    dt_softplus: bool
    dt_min: float = 0.0
    dt_max: float = math.inf


class GroupedArguments(NamedTuple):
    input: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    bias: torch.Tensor | None
    activation: str
    keep_preactivation: bool

    @property
    def keeps(self) -> bool:
        """Whether the forward returns the pre-activation; the identity's is the output."""
        return self.keep_preactivation and self.activation != "identity"


class MoeArguments(NamedTuple):
    input: torch.Tensor
    probs: torch.Tensor
    permutation: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    activation: str
    gated: bool
    interleaved: bool
    keep_preactivation: bool

    @property
    def form(self) -> tuple[str, bool, bool]:
        return self.activation, self.gated, self.interleaved


class PackArguments(NamedTuple):
    input: torch.Tensor
    probs: torch.Tensor
    expert_ids: torch.Tensor | None
    row_index: torch.Tensor | None  # the schema's index, which is a method of tuples
    num_rows: torch.Tensor | None
    span: int
    quantized: bool
    layout: Sequence[int]

    @property
    def rows(self) -> int:
        return self.input.shape[0] if self.row_index is None else self.row_index.shape[0]


class RouteOptions(NamedTuple):
    """Of ``fusedops::moe_route``, after its tensors."""

    top_k: int
    score: str
    normalize: bool
    scaling: float
    num_groups: int
    topk_groups: int
    group_score: str
    jitter: float
    capacity: int
    drop_policy: str


class RouterLossArguments(NamedTuple):
    logits: torch.Tensor
    weights: torch.Tensor | None
    z_weight: torch.Tensor | None
    mask: torch.Tensor | None
    score: str


class LossOptions(NamedTuple):
    """The numbers of a loss; ``softcap`` 0 is none. Only token_logprobs has a temperature."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    inverse_temperature: float = 1.0


class LossArguments(NamedTuple):
    logits: torch.Tensor
    target: torch.Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    dtype: torch.dtype

    @property
    def options(self) -> LossOptions:
        return LossOptions(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap)


class LinearLossArguments(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    chunk_size: int
    keep_logits: bool
    all_classes: int  # 0, or the number of all classes of which those of ``weight`` are a part

    @property
    def num_classes(self) -> int:
        return self.all_classes or self.weight.shape[0]

    @property
    def options(self) -> LossOptions:
        return LossOptions(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap)


class TokenArguments(NamedTuple):
    logits: torch.Tensor
    target: torch.Tensor
    ignore_index: int
    temperature: float
    softcap: float

    @property
    def options(self) -> LossOptions:
        return LossOptions(self.ignore_index, 0.0, 0.0, self.softcap, 1.0 / self.temperature)


class LinearTokenArguments(NamedTuple):
    hidden: torch.Tensor  # the schema's input
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    ignore_index: int
    temperature: float
    softcap: float
    chunk_size: int
    keep_logits: bool
    partial: bool  # whether the classes of ``weight`` are a part of all

    @property
    def num_classes(self) -> int:
        # As many as there are, or more: a target of -1 is then a class of another part.
        return self.weight.shape[0] + self.partial

    @property
    def options(self) -> LossOptions:
        return LossOptions(self.ignore_index, 0.0, 0.0, self.softcap, 1.0 / self.temperature)


Arguments = TypeVar("Arguments", bound=tuple[Any, ...])


@functools.cache
def _num_tensors(kind: Any) -> int:
    return sum("Tensor" in str(annotation) for annotation in kind.__annotations__.values())


def of_backward(
    kind: type[Arguments], args: Sequence[Any], incoming: int = 1
) -> tuple[Sequence[Any], Arguments, Sequence[Any], Sequence[bool]]:
    """Return incoming gradients, the op's arguments, what the forward kept, and the mask.

    A backward takes ``incoming`` gradients, the tensors of the op, what the forward kept, the
    other arguments of the op and a mask of the gradients that are asked for.
    """
    tensors: int = incoming + _num_tensors(kind)
    others = tensors - len(kind.__annotations__) - 1 - incoming
    call = kind(*args[incoming:tensors], *args[others:-1])
    return args[:incoming], call, args[tensors:others], args[-1]


def of_add_gradients(
    kind: type[Arguments], args: Sequence[Any]
) -> tuple[torch.Tensor, Arguments, torch.Tensor, Sequence[bool], Sequence[torch.Tensor | None]]:
    """Return gradient, arguments, what was kept, the mask, and the buffers that are added to.

    The buffers, one or ``None`` for each parameter, are the first arguments. The mask contains
    them.
    """
    count = len(args) - len(kind.__annotations__) - 3
    (grad,), call, (kept,), needed = of_backward(kind, args[count:])
    into = args[:count]
    return grad, call, kept, [*needed, *(buffer is not None for buffer in into)], into
