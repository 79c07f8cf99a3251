"""Functions without a rule for cut tensors raise one error that says what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from run_ranks import on_threads
from spatial_cases import mesh_of
from torch.nn import functional as F

from fusedops import UnsupportedError
from fusedops.parallel import spatial
from fusedops.parallel.spatial.refusals import REFUSED

Call = Callable[[Any], Any]
# Functions of pooling in 1 to 3 dims: the option of the key, and the arguments behind the input.
POOLS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("lp_pool", "", (2, 2)),
    ("max_pool", "_with_indices", (1, 1, 0, 1, False, True)),
    ("max_unpool", "", (torch.zeros(2, 4, 8, dtype=torch.int64), 2)),
    ("adaptive_max_pool", "_with_indices", (1, True)),
    ("adaptive_max_pool", " to more than one value", (2,)),
]


def _pool(x: Any, name: str, ndim: int, arguments: tuple[Any, ...]) -> Any:
    shaped = {1: lambda: x.select(3, 0), 2: lambda: x, 3: lambda: x.unsqueeze(-1)}[ndim]()
    return getattr(F, f"{name}{ndim}d")(shaped, *arguments)


def _set(x: Any) -> None:
    x[0] = 1.0


# By a key of the table, for x [2, 4, 8, 6] with dim 2 cut, of which views have 3 or 5 dims.
CALLS: dict[str, Call] = {
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, output_ratio=0.5),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(
        x.unsqueeze(-1), 2, output_ratio=0.5
    ),
    "interpolate with mode 'bicubic'": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "interpolate with antialias=True": lambda x: F.interpolate(
        x, scale_factor=2, mode="bilinear", antialias=True
    ),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 8, 6, 2)),
    "fold": lambda x: F.fold(x.select(3, 0), (3, 3), 2),
    "unfold": lambda x: F.unfold(x, 3),
    "any": lambda x: (x > 0).any(),
    "all": lambda x: (x > 0).all(),
    "count_nonzero": lambda x: torch.count_nonzero(x),
    "var_mean": lambda x: torch.var_mean(x),
    "std_mean": lambda x: torch.std_mean(x),
    "softmin along a cut dim": lambda x: F.softmin(x, 2),
    "argmin along a cut dim": lambda x: x.argmin(),
    "a view that merges the batch with a cut dim": lambda x: x.permute(0, 2, 3, 1).reshape(-1, 4),
    "a view that separates rows of a cut dim": lambda x: x[:, 0, :, :3].reshape(2, 12, 2),
    "cat along a dim that different axes cut": lambda x: torch.cat(
        [x, spatial.scatter(torch.ones(2, 4, 8, 6), mesh_of((1, 2)), {2: "dp"})], 2
    ),
    "expand of a cut dim": lambda x: x[:, :, :1].expand(-1, -1, 5, -1),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "multi_head_attention_forward": lambda x: torch.nn.MultiheadAttention(6, 2)(*[x[0]] * 3),
    "indexing by a tensor": lambda x: x[:, torch.tensor([0, 1])],
    "setitem": _set,
    "layer_norm over a cut dim": lambda x: F.layer_norm(x, [4, 8, 6]),
    "rms_norm over a cut dim": lambda x: F.rms_norm(x, [8, 6]),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x, x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "grad": lambda x: torch.autograd.grad(x.sum(), x),
}
# Methods by their arguments; what the key says behind the name.
METHODS: list[tuple[tuple[int, ...], str, str]] = [
    ((), "", "median prod nansum item tolist numpy"),
    ((2,), "", "sort argsort cumsum cumprod mode flip"),
    ((2, 2), "", "topk kthvalue repeat_interleave"),
    ((1,), "", "logsumexp"),
    ((1, 2), "", "roll"),
    ((1, 2, 1, 1), "", "repeat tile"),
    ((2,), " along a cut dim", "softmax log_softmax argmax max min"),
    ((2,), " of a cut dim", "unbind"),
]
CALLS |= {
    f"{name}{option}": methodcaller(name, *arguments)
    for arguments, option, names in METHODS
    for name in names.split()
}
CALLS |= {
    f"{name}{ndim}d{option}": partial(_pool, name=name, ndim=ndim, arguments=arguments)
    for name, option, arguments in POOLS
    for ndim in (1, 2, 3)
}


def test_every_refusal_has_a_case() -> None:
    assert CALLS.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", CALLS)
@on_threads(2)
def test_refused_by_name_with_what_to_do_instead(rank: int, name: str) -> None:
    mesh = mesh_of((1, 2))
    x = spatial.scatter(torch.ones(2, 4, 8, 6), mesh, {2: "y"}).requires_grad_()
    message = re.escape(f"spatial: {name} has no rule")
    with pytest.raises(UnsupportedError, match=message) as error:
        CALLS[name](x)
    assert f"; {REFUSED[name]}, or apply it to spatial.gather(tensor)" in str(error.value)


@on_threads(2)
def test_a_function_that_no_table_knows_is_refused_too(rank: int) -> None:
    x = spatial.scatter(torch.ones(2, 4, 8, 6), mesh_of((1, 2)), {2: "y"})
    with pytest.raises(UnsupportedError, match=r"cummax has no rule .* spatial.gather\(tensor\)"):
        x.cummax(2)
