"""Hot samples of operators over lists of tensors: optimizer steps, sums of squares."""

from __future__ import annotations

from typing import Any

import torch

from hot_samples.call import HotCall, New

_BLOCK = 1024  # elements of a program
# Three blocks and more, and hundreds of less than one, as biases are.
_SHAPES = [(2 * _BLOCK + 512,), (48, 3 * _BLOCK // 32), (_BLOCK,), *[(16,)] * 320]
_NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
_COUNT = range(len(_SHAPES))


def _adamw(kinds: tuple[torch.dtype, ...], *, copies: bool, draws: bool) -> HotCall:
    """Return a step of tensors of the dtypes of parameter, gradient, state and copy."""

    def make(new: New) -> Any:
        def drawn(key: str, dtype: torch.dtype) -> list[torch.Tensor]:
            return [
                new(*shape, dtype=dtype, grad=False, key=f"{key}{i}")
                for i, shape in enumerate(_SHAPES)
            ]

        param, grad, state, copy = kinds
        given = _NUMBERS | {
            "params": drawn("param", param),
            "grads": drawn("grad", grad),
            "exp_avgs": drawn("first", state),
            "exp_avg_sqs": [each.abs() for each in drawn("second", state)],
            "max_exp_avg_sqs": [],
            "copies": drawn("copy", copy) if copies else [],
            "steps": [torch.full((), 3.0, device=new.device) for _ in _COUNT],
            "grad_factor": torch.full((), 0.5, device=new.device, dtype=torch.float64),
            "found_inf": torch.zeros(1, device=new.device),
            # Key, first element, length and distance of runs.
            "draws": [n for i in _COUNT for n in (7 + i, 0, 2**40, 2**40)] if draws else [],
            "weight_decays": [0.1 * i for i in _COUNT],
            "maximize": False,
            "bias_correction": True,
        }
        schema = torch.ops.fusedops.adamw.default._schema
        return tuple(given.get(argument.name) for argument in schema.arguments)

    names = ["/".join(str(kind)[6:] for kind in kinds), "copies" * copies, "drawn" * draws]
    return HotCall("adamw", ", ".join(filter(None, names)), make)


def _square_sums(new: New) -> Any:
    # The second kernel adds one number a block: three of its own blocks.
    return ([new(*shape, grad=False) for shape in (*_SHAPES, (2 * _BLOCK**2 + 16,))],)


_F32, _BF16 = torch.float32, torch.bfloat16
CALLS: dict[str, list[HotCall]] = {
    # Master weights in float32, of which the model has rounded copies; stochastic rounding.
    "adamw": [
        _adamw((_F32, _BF16, _F32, _BF16), copies=True, draws=False),
        _adamw((_BF16,) * 4, copies=False, draws=True),
    ],
    "square_sums": [HotCall("square_sums", "shapes", _square_sums)],
}
