"""What tests, benchmarks and documentation need to know of ``selective_state_space``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusedops.ops.selective_state_space import selective_state_space
from fusedops.specs import _scan_eager
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _call(
    new: TensorFactory,
    batch: int,
    tokens: int,
    heads: int = 2,
    head_dim: int = 4,
    groups: int = 1,
    state_dim: int = 8,
    *,
    wide: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return tensors as a model has them: steps from 0.1 to 1, decays from 0.2 to 1."""
    parameters, grad = new.wide if wide else new, {"grad": False}
    dt = parameters(batch, tokens, heads, key="dt", **grad).sigmoid()
    A = parameters(heads, key="A", **grad).exp()
    return (
        new(batch, tokens, heads, head_dim, key="x"),
        dt.requires_grad_(new.grad),
        (-A).requires_grad_(new.grad),
        new(batch, tokens, groups, state_dim, key="B", scale=state_dim**-0.5),
        new(batch, tokens, groups, state_dim, key="C"),
    )


def _samples(new: TensorFactory) -> list[Sample]:
    def call(*sizes: int, **options: bool) -> tuple[torch.Tensor, ...]:
        return _call(new, *sizes, **options)

    def state(*shape: int) -> dict[str, Any]:
        return {"initial_state": new.wide(*shape, key="state"), "return_state": True}

    def options(*shape: int, wide: bool = False) -> dict[str, Any]:
        parameters = new.wide if wide else new
        own = {name: parameters(shape[2], key=name) for name in ("D", "dt_bias")}
        return {**own, "z": new(*shape, key="z"), "dt_softplus": True}

    def strided() -> tuple[torch.Tensor, ...]:
        """Return columns of one tensor, as a model splits the output of its convolution."""
        plain = call(2, 9, 2, 4, 2, 8)
        together = new(2, 9, 43, grad=False, key="together")
        x = together[..., 1:9].unflatten(2, (2, 4))
        B, C = (together[..., c : c + 16].unflatten(2, (2, 8)) for c in (9, 25))
        x, B, C = (t.requires_grad_(new.grad) for t in (x, B, C))
        return x, *plain[1:3], B, C

    ends = torch.tensor([0, 3, 3, 20, 21], device=new.device, dtype=torch.int32)
    packed, limits = {"cu_seqlens": ends}, {"dt_limit": (0.3, 0.7)}
    return [
        Sample("plain", call(4, 5)),
        Sample("options", call(2, 6), options(2, 6, 2, 4) | state(2, 2, 4, 8)),
        Sample("limits", call(2, 7), limits),
        Sample("softplus_limits", call(2, 5), options(2, 5, 2, 4) | limits),
        Sample("groups", call(1, 9, 6, 5, 2, 12), {"D": new(6, key="D")}),
        Sample("strided", strided(), state(2, 2, 4, 8)),
        Sample("packed", call(1, 21), packed | options(1, 21, 2, 4) | state(4, 2, 4, 8)),
        Sample("packed_without_state", call(1, 21, 4, 3, 2, 6), packed),
        Sample("chunks", call(1, 150, 4, 8, 2, 16), options(1, 150, 4, 8) | state(1, 4, 8, 16)),
        Sample("many_heads", call(1, 70, 20, 8, 1, 20), options(1, 70, 20, 8)),
        Sample("one_token", call(2, 1, 4, 12, 2, 20), options(2, 1, 4, 12) | state(2, 4, 12, 20)),
        Sample("float32_parameters", call(2, 5, wide=True), options(2, 5, 2, 4, wide=True)),
        Sample("large", call(1, 130, 2, 64, 1, 72), {"return_state": True}),
        Sample("no_tokens", call(2, 0)),
        Sample("no_heads", call(2, 3, 0, 4, 0, 8)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, dt = torch.randn(1, 6, 2, 4, device=device), torch.rand(1, 6, 2, device=device)
    A, B = -torch.rand(2, device=device), torch.randn(1, 6, 1, 8, device=device)
    falls, short = torch.tensor([0, 4, 3, 6], device=device), torch.tensor([0, 5], device=device)
    state, two = torch.zeros(1, 2, 4, 8, device=device), torch.tensor([0, 2, 6], device=device)
    double = {"input": x.repeat(2, 1, 1, 1), "dt": dt.repeat(2, 1, 1)}
    double |= {"B": B.repeat(2, 1, 1, 1), "C": B.repeat(2, 1, 1, 1)}
    bad = bad_changes(input=x, dt=dt, A=A, B=B, C=B)
    return [
        bad("rank", "input", "4 dims", input=x[0]),
        bad("dt", "dt", "[1, 6, 2]", "[1, 6, 1]", dt=dt[..., :1]),
        bad("A", "A", "[2]", "[2, 1]", A=A[:, None]),
        bad("B_rank", "B", "4 dims", B=B[0]),
        bad("B_tokens", "B", "[1, 6, 1, 8]", B=B[:, :5]),
        bad("C", "C", "[1, 6, 1, 8]", C=B[..., :4]),
        bad("groups", "heads", "3", B=B.repeat(1, 1, 3, 1), C=B.repeat(1, 1, 3, 1)),
        bad("state_dim", "state_dim", B=B[..., :0], C=B[..., :0]),
        bad("D", "D", "[2]", D=A[:1]),
        bad("z", "z", "[1, 6, 2, 4]", z=x[..., :2]),
        bad("dt_bias", "dt_bias", "[2]", dt_bias=A[:1]),
        bad("dtype", "C", "dtype", error=TypeError, C=B.half()),
        bad("limit", "dt_limit", "(2.0, 1.0)", dt_limit=(2.0, 1.0)),
        bad("one_limit", "dt_limit", error=TypeError, dt_limit=(2.0,)),
        bad("state", "initial_state", "[1, 2, 4, 8]", initial_state=state[:, :1]),
        bad("state_dtype", "initial_state", "float32", error=TypeError, initial_state=state.half()),
        bad("states", "initial_state", "[2, 2, 4, 8]", initial_state=state, cu_seqlens=two),
        bad("not_monotone", "cu_seqlens", "monotone", cu_seqlens=falls),
        bad("wrong_end", "cu_seqlens", "6", "5", cu_seqlens=short),
        bad("packed_batch", "input", "batch of 1", "2", cu_seqlens=two, **double),
    ]


def _case(
    batch: int, tokens: int, heads: int, head_dim: int, groups: int, state_dim: int
) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        call = _call(new, batch, tokens, heads, head_dim, groups, state_dim, wide=True)
        own = {name: new.wide(heads, key=name) for name in ("D", "dt_bias")}
        return Sample("bench", call, own | {"dt_softplus": True})

    rows = batch * tokens
    elements = 2 * rows * heads * head_dim + 2 * rows * groups * state_dim
    # The state is written and read once by each token.
    flops = 4 * rows * heads * head_dim * state_dim
    label = f"{batch}x{tokens}, {heads}/{groups} heads of {head_dim}, state {state_dim}"
    return BenchCase.moving(label, make, (elements, 2 * elements), (flops, 5 * flops // 2))


SPEC = describe(selective_state_space, _scan_eager.state_space, _samples, _bad_inputs, _case)(
    non_finite=tuple(
        functools.partial(_scan_eager.state_space, scan=scan)
        for scan in (
            _scan_eager.recurrence,
            _scan_eager.chunks,
            functools.partial(_scan_eager.chunks, multiply=_scan_eager.multiply_lower),
            _scan_eager.bounded_chunks,
        )
    ),
    bench_cases=(
        _case(1, 1024, 64, 64, 1, 128).headlined(),
        _case(2, 2048, 32, 64, 8, 128),
        _case(8, 1, 64, 64, 1, 128),
        _case(1, 200, 8, 32, 1, 64),
    ),
    summary="the state space model of Mamba-2, in chunks",
    autocast="keep",
    rows_are_independent=False,
)
