"""What tests, benchmarks and documentation need to know of ``selective_scan``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.ops.selective_scan import selective_scan
from fusedops.specs import _scan_eager
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    z: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    **options: Any,
) -> Any:
    """Go from token to token, as transformers' models do."""
    output, state = _scan_eager.state_space(
        input.unsqueeze(-1),
        dt,
        A,
        B.unsqueeze(2),
        C.unsqueeze(2),
        z=None if z is None else z.unsqueeze(-1),
        initial_state=None if initial_state is None else initial_state.unsqueeze(2),
        return_state=True,
        scan=_scan_eager.recurrence,
        **options,
    )
    output = output.squeeze(-1)
    return (output, state.squeeze(2)) if return_state else output


def _call(
    new: TensorFactory,
    batch: int,
    tokens: int,
    channels: int,
    state_dim: int = 4,
    *,
    wide: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return tensors as a model has them: steps from 0.1 to 1, decays from 0.2 to 1."""
    parameters, grad = new.wide if wide else new, {"grad": False}
    dt = parameters(batch, tokens, channels, key="dt", **grad).sigmoid()
    A = parameters(channels, state_dim, key="A", **grad).exp()
    return (
        new(batch, tokens, channels, key="x"),
        dt.requires_grad_(new.grad),
        (-A).requires_grad_(new.grad),
        new(batch, tokens, state_dim, key="B", scale=state_dim**-0.5),
        new(batch, tokens, state_dim, key="C"),
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
        """Return transposed input and steps, and columns of one tensor as B and C."""
        x, dt, A, *_ = (tensor.detach() for tensor in call(2, 9, 6, 8))
        together = new(2, 9, 17, grad=False, key="together")
        rows = (tensor.mT.contiguous().mT for tensor in (x, dt))
        call_tensors = (*rows, A, together[..., 1:9], together[..., 9:])
        return tuple(tensor.requires_grad_(new.grad) for tensor in call_tensors)

    ends = torch.tensor([0, 3, 3, 20, 21], device=new.device, dtype=torch.int32)
    packed = {"cu_seqlens": ends}
    return [
        Sample("plain", call(4, 5, 6)),
        Sample("options", call(2, 6, 5), options(2, 6, 5) | state(2, 5, 4)),
        Sample("strided", strided(), {"D": new(6, key="D")}),
        Sample("packed", call(1, 21, 5), packed | options(1, 21, 5) | state(4, 5, 4)),
        Sample("packed_without_state", call(1, 21, 3), packed),
        Sample("chunks", call(1, 70, 20, 16), options(1, 70, 20) | state(1, 20, 16)),
        Sample("several_blocks", call(1, 19, 150, 3), options(1, 19, 150)),
        Sample("one_token", call(2, 1, 20, 16), options(2, 1, 20) | state(2, 20, 16)),
        Sample("float32_parameters", call(2, 5, 6, wide=True), options(2, 5, 6, wide=True)),
        Sample("wide_state", call(1, 5, 3, 40), {"return_state": True}),
        Sample("no_tokens", call(2, 0, 6)),
        Sample("no_channels", call(2, 3, 0)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, dt = torch.randn(1, 6, 5, device=device), torch.rand(1, 6, 5, device=device)
    A, B = -torch.rand(5, 8, device=device), torch.randn(1, 6, 8, device=device)
    falls, short = torch.tensor([0, 4, 3, 6], device=device), torch.tensor([0, 5], device=device)
    state, two = torch.zeros(1, 5, 8, device=device), torch.tensor([0, 2, 6], device=device)
    double = {name: t.repeat(2, 1, 1) for name, t in (("input", x), ("dt", dt), ("B", B), ("C", B))}
    bad = bad_changes(input=x, dt=dt, A=A, B=B, C=B)
    return [
        bad("rank", "input", "3 dims", input=x[0]),
        bad("dt", "dt", "[1, 6, 5]", "[1, 6, 1]", dt=dt[..., :1]),
        bad("A", "A", "2 dims", A=A[0]),
        bad("A_channels", "A", "[5, 8]", "[4, 8]", A=A[:4]),
        bad("B", "B", "[1, 6, 8]", B=B[:, :5]),
        bad("C", "C", "[1, 6, 8]", C=B[..., :4]),
        bad("state_dim", "state_dim", A=A[:, :0], B=B[..., :0], C=B[..., :0]),
        bad("D", "D", "[5]", D=A[:1, 0]),
        bad("z", "z", "[1, 6, 5]", z=x[..., :2]),
        bad("dt_bias", "dt_bias", "[5]", dt_bias=A[:1, 0]),
        bad("dtype", "C", "dtype", error=TypeError, C=B.half()),
        bad("state", "initial_state", "[1, 5, 8]", initial_state=state[:, :1]),
        bad("state_dtype", "initial_state", "float32", error=TypeError, initial_state=state.half()),
        bad("states", "initial_state", "[2, 5, 8]", initial_state=state, cu_seqlens=two),
        bad("not_monotone", "cu_seqlens", "monotone", cu_seqlens=falls),
        bad("wrong_end", "cu_seqlens", "6", "5", cu_seqlens=short),
        bad("packed_batch", "input", "batch of 1", "2", cu_seqlens=two, **double),
    ]


def _case(batch: int, tokens: int, channels: int, state_dim: int) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        call = _call(new, batch, tokens, channels, state_dim, wide=True)
        own = {name: new.wide(channels, key=name) for name in ("D", "dt_bias")}
        gate = new(batch, tokens, channels, key="z")
        return Sample("bench", call, own | {"z": gate, "dt_softplus": True})

    elements = batch * tokens * (4 * channels + 2 * state_dim)
    label = f"{batch}x{tokens}, {channels} channels, state {state_dim}"
    return BenchCase.moving(label, make, (elements, 2 * elements))


SPEC = describe(selective_scan, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(1, 256, 1536, 16).headlined(),
        _case(8, 1, 5120, 16),
        _case(1, 100, 200, 16),
    ),
    summary="the selective scan of Mamba",
    autocast="keep",
)
