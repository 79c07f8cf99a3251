"""Hot samples of operators over lists of tensors: optimizer steps, sums of squares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fusedops.specs.hot.call import Case, HotCall, deep
from fusedops.specs.make import randn

_DTYPES = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
_NUMBERS = (1e-2, 0.9, 0.99, 1e-8)  # lr, beta1, beta2, eps


def _shapes(block: int) -> list[tuple[int, ...]]:
    """Return shapes of three blocks and more, and of less than one."""
    return [(deep(block),), (48, 3 * block // 32), (16,), (block,)]


def _adamw(case: Case) -> HotCall:
    kinds = [_DTYPES[case.types[f"{name}_ptr"]] for name in ("param", "grad", "state", "copy")]
    copies, amsgrad = bool(case.get("COPY")), bool(case.get("AMSGRAD"))
    draws = bool(case.get("DRAW_STATE") or case.get("DRAW_PARAM"))
    factor, found_inf = bool(case.get("HAS_FACTOR")), bool(case.get("HAS_FOUND_INF"))
    maximize = bool(case.get("MAXIMIZE"))
    shapes = _shapes(case.get("BLOCK", 1024))

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        def drawn(key: str, dtype: torch.dtype) -> list[torch.Tensor]:
            new = functools.partial(randn, device=device, dtype=dtype, grad=False)
            return [new(*shape, key=f"{key}{i}") for i, shape in enumerate(shapes)]

        param, grad, state, copy = kinds
        lists = [drawn("param", param), drawn("grad", grad), drawn("first", state)]
        lists.append([each.abs() for each in drawn("second", state)])
        lists.append([each.abs() for each in drawn("largest", state)] if amsgrad else [])
        lists.append(drawn("copy", copy) if copies else [])
        lists.append([torch.full((), 3.0, device=device) for _ in shapes])
        scale = torch.full((), 0.5, device=device, dtype=torch.float64) if factor else None
        flag = torch.zeros(1, device=device) if found_inf else None
        numbers: list[int] = []
        if draws:  # key, first element, length and distance of runs
            numbers = [n for i, (_, *_) in enumerate(shapes) for n in (7 + i, 0, 2**40, 2**40)]
        decays = [0.1 * i for i in range(len(shapes))]
        return (*lists, scale, flag, numbers, decays, *_NUMBERS, maximize, True)

    names = ["/".join(str(kind)[6:] for kind in kinds), "copies" * copies, "drawn" * draws]
    return HotCall("adamw", ", ".join(filter(None, names)), make)


def _square_sums(case: Case) -> HotCall:
    shapes = _shapes(case["BLOCK"])

    def make(device: torch.device, dtype: torch.dtype) -> Any:
        # The second kernel adds one number a block: three of its own blocks.
        many = [*shapes, (2 * case["BLOCK"] ** 2 + 16,)]
        new = functools.partial(randn, device=device, dtype=dtype, grad=False)
        return ([new(*shape) for shape in many],)

    return HotCall("square_sums", "shapes", make)


CALLS: dict[str, Callable[[Case], HotCall]] = {"adamw": _adamw, "square_sums": _square_sums}
