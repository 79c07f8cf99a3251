"""Benchmark rows for layers: several ops together, compared with the loop of eager models.

A layer is described as an op is, by a ``Spec``, but it is not one: nothing is registered, and the
generic tests do not know it. Groups are names for several rows: ``fusedops bench moe``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.ops.moe_mlp import moe_mlp
from fusedops.ops.moe_route import moe_route
from fusedops.specs import BenchCase, Sample, Spec
from fusedops.specs.make import TensorFactory

GROUPS = ("moe",)
# (input, expert ids [tokens, top_k], their weights, gate_up [E, 2 * inner, hidden],
# down [E, hidden, inner]) -> [tokens, hidden]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def members(name: str, ops: Iterable[str]) -> list[str]:
    """Return the rows that ``name`` stands for: those of a group, or itself."""
    if name not in GROUPS:
        return [name]
    return [*(op for op in ops if op.startswith("moe_") or op == "grouped_mm"), "moe_layer"]


def _moe_layer(
    input: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, *, top_k: int
) -> Tensor:
    """Route and compute, weights ``[num_experts, out, in]``, as a Mixtral layer does."""
    plan = moe_route(logits, top_k, normalize=True)
    return moe_mlp(input, plan, gate_up.transpose(1, 2), down.transpose(1, 2), recompute=False)


def _loop(input: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Visit the experts one after the other, as Hugging Face's eager layers do."""
    output = torch.zeros_like(input)
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        gate, up = F.linear(input[token], gate_up[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, down[expert])
        output = output.index_add(0, token, (rows * weights[token, slot, None]).to(input.dtype))
    return output


def routed(experts: Experts) -> Callable[..., Tensor]:
    """Return a layer: the routing of a Mixtral layer in front of its experts."""

    def layer(
        input: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, *, top_k: int
    ) -> Tensor:
        dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
        weights, ids = F.softmax(logits, -1, dtype=dtype).topk(top_k, -1)
        return experts(input, ids, weights / weights.sum(-1, keepdim=True), gate_up, down)

    return layer


def _layer_case(tokens: int, hidden: int, size: int, num_experts: int, top_k: int) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        # Steps of 1/16 are numbers of every dtype, and no two of a row are equal: all variants
        # choose the same experts.
        order = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(5))
        logits = (order.argsort(1) / 16).to(new.device, new.dtype).requires_grad_()
        args = (
            new(tokens, hidden),
            logits,
            new(num_experts, 2 * size, hidden, scale=hidden**-0.5),
            new(num_experts, hidden, size, scale=size**-0.5),
        )
        return Sample("bench", args, {"top_k": top_k})

    weights, flops = 3 * num_experts * hidden * size, 6 * tokens * top_k * hidden * size
    label = f"{tokens}x{hidden}, {num_experts} experts of {size}, top-{top_k}"
    elements = (weights + 2 * tokens * hidden, 2 * weights + 4 * tokens * hidden)
    return BenchCase.moving(label, make, elements, (flops, 2 * flops))


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    return [_layer_case(4, 16, 16, 4, 2).make(device, dtype)]


MOE_LAYER = Spec(
    name="moe_layer",
    op=_moe_layer,
    eager=routed(_loop),
    samples=_samples,
    bad_inputs=lambda device: [],
    bench_case=_layer_case,
    bench_cases=(
        _layer_case(1024, 1024, 1408, 8, 2).headlined(),
        _layer_case(1024, 1024, 1408, 8, 8).headlined(),
        _layer_case(1024, 768, 384, 64, 2).headlined(),
        _layer_case(1024, 768, 384, 64, 8).headlined(),
        _layer_case(128, 1024, 1408, 8, 2),
        _layer_case(16, 768, 384, 64, 8),
    ),
    summary="a layer of experts: choice, products and combination",
    autocast="lower",
)

LAYERS = {MOE_LAYER.name: MOE_LAYER}
