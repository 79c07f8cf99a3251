"""What tests, benchmarks and documentation need to know of ``causal_conv1d``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from fusedops.ops.causal_conv1d import causal_conv1d
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Apply torch's grouped convolution to each sequence, as transformers' models do."""
    batch, channels, tokens = input.shape
    width = weight.shape[1]
    ends = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [input[:, :, :0]], []
    for n in range(len(ends) - 1):
        part = input[:, :, ends[n] : ends[n + 1]].to(weight.dtype)
        history = part.new_zeros(batch, channels, width - 1)
        if initial_state is not None:
            history = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        padded = torch.cat([history.to(part), part], 2)
        states.append(padded[:, :, part.shape[2] :].to(input.dtype))
        if part.numel():
            part = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)
            part = functional.silu(part) if activation == "silu" else part
        outputs.append(part.to(input.dtype))
    output = torch.cat(outputs, 2)
    if not input.numel():  # the parameters have gradients of zeros
        output = output + 0 * (weight.sum() + (0 if bias is None else bias.sum()))
    return (output, torch.cat(states)) if return_state else output


def _samples(new: TensorFactory) -> list[Sample]:
    def call(batch: int, channels: int, tokens: int, width: int = 4) -> tuple[Any, ...]:
        size = width**-0.5
        parameters = new(channels, width, key="w", scale=size), new(channels, key="b")
        return new(batch, channels, tokens), *parameters

    def tokens_first(batch: int, tokens: int, channels: int, width: int) -> tuple[Any, ...]:
        """Return a call on columns of a wider tensor, as of a projection."""
        wide = new(batch, tokens, channels + 3, grad=False)[..., 2 : channels + 2]
        _, weight, bias = call(batch, channels, tokens, width)
        return wide.transpose(1, 2).requires_grad_(), weight, bias

    def state(*shape: int) -> dict[str, Any]:
        return {"initial_state": new(*shape, key="state"), "return_state": True}

    silu = {"activation": "silu"}
    ends = torch.tensor([0, 3, 3, 5, 40, 41], device=new.device, dtype=torch.int32)
    packed = {"cu_seqlens": ends}
    wide_weight = (new(2, 5, 6), new.wide(5, 3, key="w"), new.wide(5, key="b"))
    return [
        Sample("plain", call(4, 6, 7)),
        Sample("silu", call(2, 5, 9, 3), silu),
        Sample("no_bias", call(2, 5, 9)[:2], silu),
        Sample("tokens_first", tokens_first(2, 9, 20, 4), silu),
        Sample("state", tokens_first(2, 70, 3, 4), silu | state(2, 3, 3)),
        Sample("short", call(2, 4, 2), state(2, 4, 3)),
        Sample("one_token", tokens_first(3, 1, 20, 4), silu | state(3, 20, 3)),
        Sample("packed", tokens_first(1, 41, 5, 4), silu | packed | state(5, 5, 3)),
        Sample("packed_without_state", call(1, 5, 41, 2), packed),
        Sample("return_state", call(2, 3, 5, 2), {"return_state": True}),
        *(Sample(f"width_{width}", call(2, 3, 11, width), silu) for width in (5, 6, 7, 8)),
        Sample("float32_weight", wide_weight, silu),
        Sample("no_tokens", call(2, 3, 0), state(2, 3, 3)),
        Sample("no_batch", call(0, 3, 4)),
        Sample("no_channels", call(2, 0, 4)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, weight = torch.randn(1, 5, 6, device=device), torch.randn(5, 4, device=device)
    falls, short = torch.tensor([0, 4, 3, 6], device=device), torch.tensor([0, 5], device=device)
    two, state = torch.tensor([0, 2, 6], device=device), torch.zeros(1, 5, 3, device=device)
    bad = bad_changes(input=x, weight=weight, bias=weight[:, 0])
    return [
        bad("rank", "input", "3 dims", input=x[0]),
        bad("weight_rank", "weight", "[5, 1, 4]", weight=weight[:, None]),
        bad("channels", "weight", "[4, 4]", weight=weight[:4]),
        bad("width_1", "weight", "from 2 to 8", "1", weight=weight[:, :1]),
        bad("width_9", "weight", "from 2 to 8", "9", weight=weight.repeat(1, 3)[:, :9]),
        bad("bias", "bias", "[5]", "[4]", bias=weight[:4, 0]),
        bad("weight_dtype", "weight", "dtype", error=TypeError, weight=weight.double()),
        bad("activation", "activation", "silu", "gelu", activation="gelu"),
        bad("state", "initial_state", "[1, 5, 3]", initial_state=state[:, :, :2]),
        bad("state_dtype", "initial_state", "dtype", error=TypeError, initial_state=state.half()),
        bad("states", "initial_state", "[2, 5, 3]", initial_state=state, cu_seqlens=two),
        bad("not_monotone", "cu_seqlens", "monotone", cu_seqlens=falls),
        bad("wrong_end", "cu_seqlens", "6", "5", cu_seqlens=short),
        bad("packed_batch", "input", "batch of 1", "2", input=x.repeat(2, 1, 1), cu_seqlens=two),
    ]


def _case(batch: int, tokens: int, channels: int, width: int) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        rows = new(batch, tokens, channels, grad=False).transpose(1, 2).requires_grad_()
        call = (rows, new(channels, width, key="w"), new(channels, key="b"))
        return Sample("bench", call, {"activation": "silu"})

    size = batch * tokens * channels
    label = f"{batch}x{tokens}, {channels} channels, width {width}"
    return BenchCase.moving(label, make, (2 * size, 3 * size))


SPEC = describe(causal_conv1d, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(1, 1024, 4352, 4).headlined(),
        _case(4, 2048, 2048, 4),
        _case(2, 128, 512, 3),
    ),
    summary="causal convolution of each channel over a few tokens, with SiLU",
    autocast="keep",
)
