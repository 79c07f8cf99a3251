"""The sum of squares of each of many tensors, for norms over all parameters of a model.

In float64, whose range includes the square of every float32: a sum is inf or NaN if and only if an
element is. ``fusedops.optim`` computes norms from these sums, and adds them across processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedops._core import backends
from fusedops._core.library import define_op


def square_sums(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each tensor.

    Args:
        inputs: at least one, of any shapes and floating dtypes, on one device.

    Returns:
        float64 ``[len(inputs)]``, on their device.

    Note:
        Each tensor is divided into pieces by its own size, and the sums of the pieces are added in
        order: the bits do not depend on the number of threads or on the other tensors.

    Example:
        >>> import torch
        >>> from fusedops.ops.square_sums import square_sums
        >>> square_sums([torch.tensor([3.0, 4.0]), torch.zeros(0)])
        tensor([25.,  0.], dtype=torch.float64)
    """
    return _OP(list(inputs))


class RepeatedSums:
    """``square_sums`` by Triton kernels of tensors that come again at other addresses.

    Whoever calls this knows that the tensors are of the same form.

    Args:
        inputs: tensors of the first call, contiguous; no reference to them is stored.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        from fusedops.kernels import square_sums as kernels

        self._launches = kernels.launches(inputs)
        self._count, self._device = len(inputs), inputs[0].device

    @staticmethod
    def serves(inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether Triton serves these tensors, and they are contiguous."""
        chosen = backends.resolve("square_sums", list(inputs))
        return chosen.backend == "triton" and all(tensor.is_contiguous() for tensor in inputs)

    def move(self, addresses: torch.Tensor) -> None:
        """Take the addresses of the next call's tensors, int64 ``[len(inputs)]``."""
        for launch in self._launches:
            launch.move(addresses)

    def __call__(self) -> torch.Tensor:
        """Return the sums of the tensors, as ``square_sums`` does."""
        sums = torch.empty(self._count, dtype=torch.float64, device=self._device)

        def launch() -> None:
            for batch in self._launches:
                batch.run(sums)

        backends.repeat("square_sums", launch)
        return sums


def _reference(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in inputs])


_OP = define_op(
    "square_sums",
    "(Tensor[] inputs) -> (Tensor sums)",
    contract={"inputs": "each float [*shape]", "sums": "float64 [len(inputs)]"},
    reference=_reference,
    triton="fusedops.kernels.square_sums",
    part_of="optim",
)
