"""Hot samples of operators over lists of tensors: optimizer steps, sums of squares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fusedops.specs.make import randn
from hot_samples.call import HotCall, ReportCase, deep

_BIASES = 320
_BLOCK = 1024  # elements of a program
_DTYPES = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
# Master weights in float32, of which the model has rounded copies: where a case does not say.
_MASTER = {"param": "*fp32", "grad": "*bf16", "state": "*fp32", "copy": "*bf16"}
_NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}


def _shapes(block: int) -> list[tuple[int, ...]]:
    """Return shapes of three blocks and more, and hundreds of less than one, as biases are."""
    return [(deep(block),), (48, 3 * block // 32), (block,), *[(16,)] * _BIASES]


def _adamw(case: ReportCase) -> HotCall:
    kinds = [_DTYPES[case.types.get(f"{name}_ptr", kind)] for name, kind in _MASTER.items()]
    copies, amsgrad = bool(case.get("COPY", True)), bool(case.get("AMSGRAD"))
    draws = bool(case.get("DRAW_STATE") or case.get("DRAW_PARAM"))
    factor, found_inf = case.get("HAS_FACTOR", True), case.get("HAS_FOUND_INF", True)
    maximize = bool(case.get("MAXIMIZE"))
    shapes = _shapes(_BLOCK)

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        def drawn(key: str, dtype: torch.dtype) -> list[torch.Tensor]:
            new = functools.partial(randn, device=device, dtype=dtype, grad=False)
            return [new(*shape, key=f"{key}{i}") for i, shape in enumerate(shapes)]

        param, grad, state, copy = kinds
        largest, numbers = drawn("largest", state) if amsgrad else [], range(len(shapes))
        scale = torch.full((), 0.5, device=device, dtype=torch.float64) if factor else None
        given = _NUMBERS | {
            "params": drawn("param", param),
            "grads": drawn("grad", grad),
            "exp_avgs": drawn("first", state),
            "exp_avg_sqs": [each.abs() for each in drawn("second", state)],
            "max_exp_avg_sqs": [each.abs() for each in largest],
            "copies": drawn("copy", copy) if copies else [],
            "steps": [torch.full((), 3.0, device=device) for _ in numbers],
            "grad_factor": scale,
            "found_inf": torch.zeros(1, device=device) if found_inf else None,
            # Key, first element, length and distance of runs.
            "draws": [n for i in numbers for n in (7 + i, 0, 2**40, 2**40)] if draws else [],
            "weight_decays": [0.1 * i for i in numbers],
            "maximize": maximize,
            "bias_correction": True,
        }
        schema = torch.ops.fusedops.adamw.default._schema
        return tuple(given.get(argument.name) for argument in schema.arguments)

    names = ["/".join(str(kind)[6:] for kind in kinds), "copies" * copies, "drawn" * draws]
    return HotCall("adamw", ", ".join(filter(None, names)), make)


def _square_sums(case: ReportCase) -> HotCall:
    def make(device: torch.device, dtype: torch.dtype) -> Any:
        # The second kernel adds one number a block: three of its own blocks.
        many = [*_shapes(_BLOCK), (2 * _BLOCK**2 + 16,)]
        new = functools.partial(randn, device=device, dtype=dtype, grad=False)
        return ([new(*shape) for shape in many],)

    return HotCall("square_sums", "shapes", make)


CALLS: dict[str, Callable[[ReportCase], HotCall]] = {"adamw": _adamw, "square_sums": _square_sums}
