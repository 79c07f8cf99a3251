"""What torch's ``FlopCounterMode`` counts for the ops that multiply matrices.

Without a formula it counts 0 for them, and a patched model would seem to do a fraction of its
work. Two operations per multiply-add, products alone, as torch counts its own; what a backward
makes again counts; causality, windows and the unused end of a cache do not lessen the count.
Formulae see the ops' arguments in the order of their schemas, shapes in place of tensors (packed
sequences: the tensors). They wait for somebody to import the counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fusedops._core import checks, imports

_Shape = Sequence[int]


def _linear(input: _Shape, weight: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * weight[0]


def _linear_backward(*args: Any, **__: Any) -> int:
    _, input, weight, _, kept, activation, *_, mask = args
    again = prod(kept) == 0 and activation != "identity"
    return _linear(input, weight) * (mask[0] + mask[1] + again)


def _linear_glu(input: _Shape, weight: _Shape, *_: Any, **__: Any) -> int:
    return 2 * _linear(input, weight)


def _linear_glu_backward(*args: Any, **__: Any) -> int:
    _, input, weight, _, kept, *_, mask = args
    again = prod(kept) == 0
    return _linear(input, weight) * (2 * mask[0] + mask[1] + mask[2] + 2 * again)


def _mlp(input: _Shape, w1: _Shape, b1: Any, w2: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input[:-1]) * (prod(w1) + prod(w2))


def _mlp_backward(*args: Any, **__: Any) -> int:
    _, input, w1, _, w2, _, kept, *_, mask = args
    again = prod(kept) == 0
    first, second = mask[0] + mask[1] + again, any(mask[:3]) + mask[3]
    return 2 * prod(input[:-1]) * (first * prod(w1) + second * prod(w2))


def _mlp_tiled(input: _Shape, w1: _Shape, b1: Any, up: Any, w2: _Shape, *_: Any, **__: Any) -> int:
    first = prod(w1) * (1 if up is None else 2)
    return 2 * prod(input[:-1]) * (first + prod(w2))


def _mlp_tiled_backward(*args: Any, **__: Any) -> int:
    _, input, w1, _, up, w2, *_, mask = args
    sides = 1 if up is None else 2
    first = mask[0] * sides + mask[1] + mask[3] + any(mask[:5]) * sides
    second = any(mask[:5]) + mask[4]
    return 2 * prod(input[:-1]) * (first * prod(w1) + second * prod(w2))


def _baddbmm(input: Any, batch1: _Shape, *_: Any, out_shape: _Shape, **__: Any) -> int:
    return 2 * prod(out_shape) * batch1[-1]


def _baddbmm_backward(*args: Any, **__: Any) -> int:
    grad, batch1, *_, mask = args
    return 2 * prod(grad) * batch1[-1] * (mask[1] + mask[2])


def _linear_cross_entropy_backward(*args: Any, **__: Any) -> int:
    _, hidden, weight, _, _, _, logits, *_, mask = args
    again = prod(logits) == 0
    return _linear(hidden, weight) * (mask[0] + mask[1] + again)


def _grouped_mm(input: _Shape, weight: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * weight[-1]


def _grouped_mm_backward(*args: Any, **__: Any) -> int:
    _, input, weight, _, _, kept, activation, *_, mask = args
    again = prod(kept) == 0 and activation != "identity"
    return _grouped_mm(input, weight) * (mask[0] + mask[1] + again)


def _grouped_mm_add_gradients(*args: Any, **__: Any) -> int:
    into, call, mask = args[:2], args[2:-1], args[-1]
    return _grouped_mm_backward(*call, [*mask, *(buffer is not None for buffer in into)])


def _moe_mlp(*args: Any, **__: Any) -> int:
    _, probs, _, _, _, w1, w2, *_ = args
    return 2 * prod(probs) * (prod(w1[1:]) + prod(w2[1:]))


def _moe_mlp_backward(*args: Any, **__: Any) -> int:
    _, _, probs, _, _, _, w1, w2, _, _, kept, *_, mask = args
    first = mask[0] + mask[2] + (prod(kept) == 0)
    second = any(mask[:3]) + mask[3]
    return 2 * prod(probs) * (first * prod(w1[1:]) + second * prod(w2[1:]))


def _moe_mlp_add_gradients(*args: Any, **__: Any) -> int:
    into, call, mask = args[:4], args[4:-1], args[-1]
    return _moe_mlp_backward(*call, [*mask, *(buffer is not None for buffer in into)])


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward(*args: Any, **__: Any) -> int:
    _, _, query, key, value, *_, mask = args
    # The scores again, for the gradients of queries and keys; that of the probabilities, of values.
    sizes = (1 + mask[0] + mask[1]) * query[3] + (1 + mask[2]) * value[3]
    return 2 * prod(query[:3]) * key[2] * sizes


def _pairs(ends_q: torch.Tensor, ends_k: torch.Tensor, most: int) -> int:
    """Return the pairs of query and key of packed sequences, at most where no value can be read."""
    if checks.readable(ends_q) and checks.readable(ends_k):
        return int((ends_q.diff() * ends_k.diff()).sum())
    return most


def _attention_varlen(*args: Any, **__: Any) -> int:
    query, _, value, ends_q, ends_k, *_ = args
    tokens, heads, size = query.shape
    return 2 * _pairs(ends_q, ends_k, tokens * args[9]) * heads * (size + value.shape[2])


def _attention_varlen_backward(grad: Any, grad_lse: Any, *call: Any, **_: Any) -> int:
    query, _, value, ends_q, ends_k = call[:5]
    mask, most = call[-1], query.shape[0] * call[12]
    sizes = (1 + mask[0] + mask[1]) * query.shape[2] + (1 + mask[2]) * value.shape[2]
    return 2 * _pairs(ends_q, ends_k, most) * query.shape[1] * sizes


def _delta_rule(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    # The state is multiplied by the keys, by the queries, and gets the products of keys and values.
    return 6 * prod(value) * key[3]


def _delta_rule_backward(*args: Any, **__: Any) -> int:
    # Two products make the states again; the other six are those of the gradients.
    return 16 * prod(args[4]) * int(args[3][3])


def _quantized_linear(input: _Shape, *args: Any, **__: Any) -> int:
    _, _, _, _, out_features, *_ = args
    return 2 * prod(input) * int(out_features)


def _quantized_linear_backward(grad: _Shape, *args: Any, **__: Any) -> int:
    _, _, in_features, *_, mask = args
    return 2 * prod(grad) * int(in_features) * int(mask[0])


def _selective_state_space(*args: Any, **__: Any) -> int:
    input, _, _, B, *_ = args
    # The state of each token is written and read.
    return 4 * prod(input) * B[3]


def _selective_state_space_backward(*args: Any, **__: Any) -> int:
    # The states again, and the gradients of input, B, C and the state.
    return 5 * _selective_state_space(*args[2:]) // 2


_FORMULAE = {
    "linear_act": (_linear, _linear_backward),
    "linear_glu": (_linear_glu, _linear_glu_backward),
    "mlp": (_mlp, _mlp_backward),
    "mlp_tiled": (_mlp_tiled, _mlp_tiled_backward),
    "quantized_linear": (_quantized_linear, _quantized_linear_backward),
    "baddbmm": (_baddbmm, _baddbmm_backward),
    "linear_cross_entropy": (_linear, _linear_cross_entropy_backward),
    "linear_token_logprobs": (_linear, _linear_cross_entropy_backward),
    "grouped_mm": (_grouped_mm, _grouped_mm_backward),
    "grouped_mm_add_gradients": (_grouped_mm_add_gradients, None),
    "moe_mlp": (_moe_mlp, _moe_mlp_backward),
    "moe_mlp_add_gradients": (_moe_mlp_add_gradients, None),
    "attention": (_attention, _attention_backward),
    "attention_decode": (_attention, None),
    "selective_state_space": (_selective_state_space, _selective_state_space_backward),
    "gated_delta_rule": (_delta_rule, _delta_rule_backward),
}
_OF_TENSORS = {"attention_varlen": (_attention_varlen, _attention_varlen_backward)}


def register() -> None:
    """Tell torch's counter the formulae, now or when it is imported."""
    imports.after("torch.utils.flop_counter", _tell)


def _tell() -> None:
    from torch.utils import flop_counter

    register: Any = flop_counter.register_flop_formula  # its type knows one signature alone
    for name, formulae in [*_FORMULAE.items(), *_OF_TENSORS.items()]:
        for op, formula in zip((name, f"{name}_backward"), formulae, strict=True):
            if formula is not None:
                packet = getattr(torch.ops.fusedops, op)
                register(packet, get_raw=name in _OF_TENSORS)(formula)
