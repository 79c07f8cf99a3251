"""``LinearCrossEntropyLoss``: a language model's head and its loss in one module."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops._core import checks
from fusedops.nn._arguments import check_flags, check_place, check_sizes, shown, values_of
from fusedops.nn.linear_act import LinearParameters
from fusedops.ops._cross_entropy_math import check_options
from fusedops.ops.linear_cross_entropy import check_chunks, linear_cross_entropy

_OF_LOSS = ("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction")
_OPTIONS = (*_OF_LOSS, "chunk_size", "recompute")


class LinearCrossEntropyLoss(LinearParameters):
    """Compute the loss of a language model from its last hidden states.

    ``cross_entropy(hidden @ weight.T + bias, target)``

    The module owns the head's weight, so that FSDP2's ``fully_shard`` and similar code gathers it
    for this module's forward and backward, and no other module reads it. Parameters, ``state_dict``
    keys and initialisation are those of ``torch.nn.Linear``; tie it by ``loss.weight =
    embedding.weight``.

    Args:
        hidden_size: size of the input's last dimension.
        vocab_size: number of classes.
        bias: whether there is a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        ignore_index: this and the following as in ``fusedops.linear_cross_entropy``.

    Raises:
        ValueError: an option is out of range.

    Note:
        Numerics and backends are those of ``fusedops.linear_cross_entropy``. The mean is over the
        rows of the call: data-parallel ranks with different numbers of ignored rows average their
        means, as with torch's loss. Under FSDP2 register the second entry point:
        ``torch.distributed.fsdp.register_fsdp_forward_method(loss, "logits")``.

    Example:
        >>> import torch, fusedops
        >>> head = fusedops.nn.LinearCrossEntropyLoss(3, 8)
        >>> hidden = torch.ones(2, 3)
        >>> head(hidden, torch.tensor([5, -100])).shape, head.logits(hidden).shape
        (torch.Size([]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        chunk_size: int | None = None,
        recompute: bool | None = None,
    ) -> None:
        op = "LinearCrossEntropyLoss"
        check_sizes(op, hidden_size=hidden_size, vocab_size=vocab_size)
        check_flags(op, bias=bias)
        check_place(op, device, dtype)
        check_options(op, ignore_index, label_smoothing, z_loss, softcap, reduction)
        check_chunks(op, chunk_size, recompute)
        super().__init__(hidden_size, vocab_size, bias, device, dtype)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.reduction = reduction
        self.chunk_size = chunk_size
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``hidden`` ``[..., hidden_size]`` and ``target`` ``[...]``."""
        options = values_of(self, *_OPTIONS)
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **options)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[..., vocab_size]``, soft-capped, as generation needs them."""
        checks.tensor("LinearCrossEntropyLoss.logits", "hidden", hidden)
        logits = F.linear(hidden, self.weight, self.bias)
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    def extra_repr(self) -> str:
        """Return sizes and options."""
        return shown(self, "hidden_size", "vocab_size", "bias", *_OPTIONS)
