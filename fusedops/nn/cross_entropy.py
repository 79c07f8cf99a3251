"""``CrossEntropyLoss``: torch's loss module, fused if the op supports the arguments."""

from __future__ import annotations

import torch
from torch import nn

from fusedops._core import checks
from fusedops.nn._arguments import shown, values_of
from fusedops.ops._cross_entropy_math import check_options
from fusedops.ops.cross_entropy import cross_entropy

_OPTIONS = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap")


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Compute the cross-entropy between logits and targets.

    ``loss = log sum_j exp(y_j) - y_target``

    Constructor arguments are those of ``torch.nn.CrossEntropyLoss``, of which it is a subclass.
    Class indices for logits ``[N, C]`` or ``[C]`` run the fused op. Class weights, class
    probabilities as targets and more dimensions (torch's ``[N, C, d1, ...]``) run torch's own loss,
    with exactly its result.

    Args:
        weight: class weights ``[C]``; then torch's loss runs.
        size_average: deprecated in torch.
        ignore_index: this, ``reduction`` and ``label_smoothing`` as in ``fusedops.cross_entropy``.
        reduce: deprecated in torch.
        z_loss: as in ``fusedops.cross_entropy``; torch does not offer it.
        softcap: likewise.

    Raises:
        ValueError: an option is out of range, or ``z_loss`` or ``softcap`` is combined with an
            option that only torch's loss supports.

    Note:
        Numerics and backends of the fused path are those of ``fusedops.cross_entropy``.

    Example:
        >>> import torch, fusedops
        >>> loss = fusedops.nn.CrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.zeros(2, 4), torch.tensor([2, 0]))
        tensor(1.3863)
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        op = "CrossEntropyLoss"
        for name, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                checks.flag(op, name, value)
        if weight is not None:
            checks.tensor(op, "weight", weight)
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        check_options(op, ignore_index, label_smoothing, z_loss, softcap, self.reduction)
        if weight is not None and (z_loss or softcap is not None):
            checks.fail(op, "weight", "None with z_loss or softcap", "class weights")
        self.z_loss = z_loss
        self.softcap = softcap

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits ``[N, C]`` or ``[C]`` (or whatever else torch takes)."""
        checks.tensor("CrossEntropyLoss", "input", input)
        known = (torch.int64, torch.uint8, *checks.FLOATING)
        checks.index_tensor("CrossEntropyLoss", "target", target, dtypes=known)
        if target.is_floating_point():
            checks.shape("CrossEntropyLoss", "target", target, input.shape, "of probabilities")
        if self.weight is None and input.dim() <= 2 and target.dtype == torch.int64:
            return cross_entropy(input, target, **values_of(self, *_OPTIONS))
        if self.z_loss or self.softcap is not None:
            expected = "logits [N, C] or [C] with class indices, for z_loss or softcap"
            got = f"{list(input.shape)} with {target.dtype} targets"
            checks.fail("CrossEntropyLoss", "input", expected, got)
        return super().forward(input, target)

    def extra_repr(self) -> str:
        """Return the options."""
        return shown(self, *_OPTIONS)
