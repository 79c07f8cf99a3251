"""Functions that few models of images call: refused by name, with what to do instead.

A function that is neither here nor among the rules is refused in general words.
"""

from __future__ import annotations

from typing import Any

from fusedops._core.checks import UnsupportedError

# By what a model does instead: functions, or a function with an option.
_INSTEAD: dict[str, tuple[str, ...]] = {
    "write it as avg_pool of a power of the tensor": ("lp_pool1d", "lp_pool2d", "lp_pool3d"),
    "use max_pool or interpolate": ("fractional_max_pool2d", "fractional_max_pool3d"),
    "use max pooling without indices, and a transposed convolution to upsample": (
        *(f"max_pool{ndim}d_with_indices" for ndim in (1, 2, 3)),
        *(f"adaptive_max_pool{ndim}d_with_indices" for ndim in (1, 2, 3)),
        *("max_unpool1d", "max_unpool2d", "max_unpool3d"),
    ),
    "use max_pool, or one value": tuple(
        f"adaptive_max_pool{ndim}d to more than one value" for ndim in (1, 2, 3)
    ),
    "use mode='bilinear'": ("interpolate with mode 'bicubic'",),
    "use avg_pool before interpolate": ("interpolate with antialias=True",),
    "cut the tensor after this layer": ("grid_sample",),
    "use a transposed convolution": ("fold",),
    "use a convolution, or a view and a permutation": ("unfold",),
    "reduce dims that are not cut with sum, mean, amax or argmax": (
        *("sort", "argsort", "topk", "cumsum", "cumprod", "median", "mode", "kthvalue", "prod"),
        *("any", "all", "count_nonzero", "nansum", "logsumexp"),
        *("argmax along a cut dim", "argmin along a cut dim"),
    ),
    "call var and mean": ("var_mean",),
    "call std and mean": ("std_mean",),
    "compute it along a dim that is not cut": tuple(
        f"{name} along a cut dim" for name in ("softmax", "log_softmax", "softmin")
    ),
    "call amax, which has no indices": ("max along a cut dim",),
    "call amin, which has no indices": ("min along a cut dim",),
    "keep the batch a dim of its own": ("a view that merges the batch with a cut dim",),
    "pad the dim to a multiple of the inner size": ("a view that separates rows of a cut dim",),
    "scatter both with the same dims": ("cat along a dim that different axes cut",),
    "use interpolate(mode='nearest')": ("expand of a cut dim", "repeat_interleave"),
    "write it with permute and torch.matmul": ("einsum",),
    "call scaled_dot_product_attention of the projections": ("multi_head_attention_forward",),
    "expand a dim of one row, or use interpolate(mode='nearest')": ("repeat", "tile"),
    "flip the tensor before spatial.scatter": ("flip",),
    "use F.pad(mode='circular') and a slice": ("roll",),
    "take slices x[:, :, i : i + 1]": ("unbind of a cut dim",),
    "use slices, or torch.where with a mask": ("indexing by a tensor",),
    "use torch.where or torch.cat, which make another tensor": ("setitem",),
    "reduce to one value first, as x.mean().item() does": ("item",),
    "use the rows of this process, tensor.local": ("tolist", "numpy"),
    "use group_norm(1, channels), or normalize the channels alone": ("layer_norm over a cut dim",),
    "normalize the channels alone": ("rms_norm over a cut dim",),
    "use batch_norm or group_norm": ("local_response_norm",),
    "write it with elementwise functions and mean()": ("soft_margin_loss", "gaussian_nll_loss"),
    "use dropout": ("alpha_dropout",),
    "call backward, and read the attribute grad": ("grad",),
}
REFUSED = {name: advice for advice, names in _INSTEAD.items() for name in names}
_OTHERS = "keep the dims that it reads uncut"


def refuse(name: str) -> Any:
    """Raise the error of a function that has no rule for cut tensors."""
    raise UnsupportedError(
        f"spatial: {name} has no rule for a tensor that is cut over processes; "
        f"{REFUSED.get(name, _OTHERS)}, or apply it to spatial.gather(tensor)"
    )
