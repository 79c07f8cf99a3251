"""Loss-free balancing: the update of a router's bias between optimizer steps."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks


def check_rate(op: str, rate: Any) -> None:
    checks.finite(op, "rate", rate, least=0)


@torch.no_grad()
def update_balancing_bias(
    bias: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    *,
    rate: float = 1e-3,
    centered: bool = False,
    group: Any = None,
) -> torch.Tensor:
    """Raise the bias of experts with few tokens and lower that of those with many, in place.

    ``bias += rate * sign(mean(tokens) - tokens)``

    Args:
        bias: ``[E]`` floating, the ``bias`` of ``moe_route``.
        tokens_per_expert: ``[E]``, the choices of an optimizer step (not of a micro-batch).
        rate: size of the update, at least 0.
        centered: subtract the mean of the update, so that the mean of the bias does not change.
        group: a process group: counts are summed over its ranks first, and all ranks make the same
            update.

    Returns:
        ``bias``.

    Raises:
        ValueError: a shape or device does not fit, ``rate`` is negative, the elements of ``bias``
            share memory, or (CPU) a count, summed over the group, is negative, NaN or infinite.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        The host does not wait for the device. ``nn.BalancingBias`` counts and calls this.

    Reference:
        Wang et al.: Auxiliary-Loss-Free Load Balancing, arXiv:2408.15664.

    Example:
        >>> import torch, fusedops
        >>> fusedops.update_balancing_bias(torch.zeros(3), torch.tensor([5, 0, 1]), rate=0.1)
        tensor([-0.1000,  0.1000,  0.1000])
    """
    op = "update_balancing_bias"
    checks.tensor(op, "bias", bias)
    if bias.dim() != 1:
        checks.fail(op, "bias", "of 1 dim, [experts]", list(bias.shape))
    counted = (torch.int64, torch.int32, *checks.FLOATING)
    checks.index_tensor(op, "tokens_per_expert", tokens_per_expert, dtypes=counted)
    checks.shape(op, "tokens_per_expert", tokens_per_expert, bias.shape, "that of bias")
    if tokens_per_expert.device != bias.device:
        expected = f"on {bias.device}, the device of bias"
        checks.fail(op, "tokens_per_expert", expected, tokens_per_expert.device)
    if len(bias) > 1 and bias.stride(0) == 0:
        expected = "a tensor that can be written, for example bias.clone()"
        checks.fail(op, "bias", expected, "an expanded one, whose elements share memory")
    check_rate(op, rate)
    checks.flag(op, "centered", centered)
    checks.group(op, "group", group)
    # Before the sum over ranks: it may be more than a narrow dtype of one rank's counts holds.
    counts = tokens_per_expert.to(torch.float64, copy=True)
    if group is not None:
        import torch.distributed as dist

        dist.all_reduce(counts, group=group)
    # After it, so that all ranks of the group raise.
    if checks.readable(counts):
        legal = (counts >= 0) & counts.isfinite()
        if not bool(legal.all()):
            expert = int(legal.logical_not().nonzero()[0])
            got = f"{float(counts[expert])} for expert {expert}"
            checks.fail(op, "tokens_per_expert", "of finite counts, at least 0", got)
    # In double: the mean of counts below 2**53 times the number of experts, and its sign, is exact
    # up to one rounding.
    step = torch.sign(counts.mean() - counts)
    if centered:
        step = step - step.mean()
    return bias.add_((float(rate) * step).to(bias.dtype))
