"""Functions that few models of images call: refused by name, with what to do instead.

A function that is neither here nor among the rules is refused in general words.
"""

from __future__ import annotations

from typing import Any

from fusedops._core.checks import UnsupportedError

_NDIM = (1, 2, 3)
_MAX_INDICES = "use max pooling without indices, and a transposed convolution to upsample"
_ELEMENTWISE = "write it with elementwise functions and mean()"
_REDUCE = "reduce dims that are not cut with sum, mean, amax or argmax"
_DENSE = "cut the tensor after this layer"

# By a function, or a function with an option: what a model does instead.
REFUSED: dict[str, str] = {
    **{f"lp_pool{n}d": "write it as avg_pool of a power of the tensor" for n in _NDIM},
    **{f"fractional_max_pool{n}d": "use max_pool or interpolate" for n in (2, 3)},
    **{f"max_pool{n}d_with_indices": _MAX_INDICES for n in _NDIM},
    **{f"max_unpool{n}d": _MAX_INDICES for n in _NDIM},
    **{f"adaptive_max_pool{n}d_with_indices": _MAX_INDICES for n in _NDIM},
    **{
        f"adaptive_max_pool{n}d to more than one value": "use max_pool, or one value" for n in _NDIM
    },
    "interpolate with mode 'bicubic'": "use mode='bilinear'",
    "interpolate with antialias=True": "use avg_pool before interpolate",
    "grid_sample": _DENSE,
    "fold": "use a transposed convolution",
    "unfold": "use a convolution, or a view and a permutation",
    "sort": _REDUCE,
    "argsort": _REDUCE,
    "topk": _REDUCE,
    "cumsum": _REDUCE,
    "cumprod": _REDUCE,
    "median": _REDUCE,
    "mode": _REDUCE,
    "kthvalue": _REDUCE,
    "prod": _REDUCE,
    "any": _REDUCE,
    "all": _REDUCE,
    "count_nonzero": _REDUCE,
    "nansum": _REDUCE,
    "logsumexp": _REDUCE,
    "var_mean": "call var and mean",
    "std_mean": "call std and mean",
    **{
        f"{name} along a cut dim": "compute it along a dim that is not cut"
        for name in ("softmax", "log_softmax", "softmin")
    },
    "argmax along a cut dim": _REDUCE,
    "argmin along a cut dim": _REDUCE,
    "max along a cut dim": "call amax, which has no indices",
    "min along a cut dim": "call amin, which has no indices",
    "a view that merges the batch with a cut dim": "keep the batch a dim of its own",
    "a view that separates rows of a cut dim": "pad the dim to a multiple of the inner size",
    "cat along a dim that different axes cut": "scatter both with the same dims",
    "expand of a cut dim": "use interpolate(mode='nearest')",
    "einsum": "write it with permute and torch.matmul",
    "multi_head_attention_forward": "call scaled_dot_product_attention of the projections",
    "repeat": "expand a dim of one row, or use interpolate(mode='nearest')",
    "tile": "expand a dim of one row, or use interpolate(mode='nearest')",
    "repeat_interleave": "use interpolate(mode='nearest')",
    "flip": "flip the tensor before spatial.scatter",
    "roll": "use F.pad(mode='circular') and a slice",
    "unbind of a cut dim": "take slices x[:, :, i : i + 1]",
    "indexing by a tensor": "use slices, or torch.where with a mask",
    "setitem": "use torch.where or torch.cat, which make another tensor",
    "item": "reduce to one value first, as x.mean().item() does",
    "tolist": "use the rows of this process, tensor.local",
    "numpy": "use the rows of this process, tensor.local",
    "layer_norm over a cut dim": "use group_norm(1, channels), or normalize the channels alone",
    "rms_norm over a cut dim": "normalize the channels alone",
    "local_response_norm": "use batch_norm or group_norm",
    "soft_margin_loss": _ELEMENTWISE,
    "gaussian_nll_loss": _ELEMENTWISE,
    "alpha_dropout": "use dropout",
    "grad": "call backward, and read the attribute grad",
}
_OTHERS = "keep the dims that it reads uncut"


def refuse(name: str) -> Any:
    """Raise the error of a function that has no rule for cut tensors."""
    raise UnsupportedError(
        f"spatial: {name} has no rule for a tensor that is cut over processes; "
        f"{REFUSED.get(name, _OTHERS)}, or apply it to spatial.gather(tensor)"
    )
