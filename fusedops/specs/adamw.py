"""What tests and fuzzers need to know of ``adamw``."""

from __future__ import annotations

from typing import Any

import torch

from fusedops.specs.spec import MultiTensorSpec, Sample

_SHAPES = ((7,), (3, 5), (), (0, 4), (66,))
_NUMBERS = (1e-2, 0.9, 0.99, 1e-8)  # lr, beta1, beta2, eps


def _call(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    grad: torch.dtype | None = None,
    state: torch.dtype | None = None,
    copy: torch.dtype | None = None,
    amsgrad: bool = False,
    draws: bool = False,
    scaled: bool = False,
    transposed: bool = False,
) -> Sample:
    """Return a call whose parameters have ``dtype``, as all tensors have that are not given one."""

    def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
        made = [torch.randn(shape, device=device).abs().to(dtype) for shape in _SHAPES]
        return [tensor.t() if transposed and tensor.dim() == 2 else tensor for tensor in made]

    grad, state = grad or dtype, state or dtype
    lists = [drawn(dtype), drawn(grad), drawn(state), drawn(state)]
    lists.append(drawn(state) if amsgrad else [])
    lists.append(drawn(copy) if copy is not None else [])
    lists.append([torch.full((), 3.0, device=device) for _ in _SHAPES])
    # grad_factor, found_inf, learning_rate
    factors: tuple[Any, ...] = (None, None, None)
    if scaled:
        made = (torch.full((), 0.5), torch.zeros(1), torch.full((), 2e-2, dtype=torch.float64))
        factors = tuple(factor.to(device) for factor in made)
    numbers = [n for i in range(len(_SHAPES)) for n in (-12 + i, 4 * i, 3, 5)] if draws else []
    decays = [0.1 * i for i in range(len(_SHAPES))]
    return Sample(name, (*lists, *factors, numbers, decays, *_NUMBERS, False, True))


def _calls(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    calls = [
        _call("plain", device, dtype),
        _call("amsgrad", device, dtype, amsgrad=True),
        _call("scaled", device, dtype, scaled=True),
        _call("transposed", device, dtype, transposed=True, copy=dtype),
        _call("draws", device, dtype, draws=True, amsgrad=True),
    ]
    if dtype == torch.float32:
        half = torch.bfloat16
        calls.append(_call("master weights", device, dtype, grad=half, copy=half, scaled=True))
        calls.append(_call("half states", device, dtype, state=half, draws=True))
    return calls


SPEC = MultiTensorSpec("adamw", _calls)
