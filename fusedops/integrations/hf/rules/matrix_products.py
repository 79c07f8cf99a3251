"""The products by which code writes attention out: matmul, bmm, baddbmm and einsum as one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class MatrixProduct(NamedTuple):
    """``beta * bias + alpha * left @ right`` over the last two dims.

    Attributes:
        left: ``[..., I, D]``.
        right: ``[..., D, J]``.
        bias: is added, or ``None``.
        beta: factor of the bias.
        alpha: factor of the product.
        order: the permutation of the result's dims that the code expects, or ``None``.
    """

    left: Any
    right: Any
    bias: Any = None
    beta: float = 1.0
    alpha: float = 1.0
    order: tuple[int, ...] | None = None

    @property
    def of_weights(self) -> bool:
        """Whether the result is no ``[..., I, J]``, so that it cannot be scores."""
        return self.order is not None

    def restored(self, output: torch.Tensor) -> torch.Tensor:
        """Return ``left @ right`` with the dims in the order that the code expects."""
        return output if self.order is None else output.permute(self.order)


# Names of the arguments of torch's functions; the first is also that of the method.
_NAMES: dict[Any, tuple[str, ...]] = {
    torch.matmul: ("input", "other"),
    torch.Tensor.matmul: ("input", "other"),
    torch.Tensor.__matmul__: ("input", "other"),
    torch.bmm: ("input", "mat2"),
    torch.Tensor.bmm: ("input", "mat2"),
    torch.baddbmm: ("input", "batch1", "batch2"),
    torch.Tensor.baddbmm: ("input", "batch1", "batch2"),
}
FUNCTIONS = (torch.matmul, torch.bmm, torch.baddbmm, torch.einsum)


def product_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MatrixProduct | None:
    """Return the product that a call computes, ``None`` if it is another one.

    Args:
        function: one of ``FUNCTIONS``, or the method of that name.
        args: of the call.
        kwargs: of the call.
    """
    if function is torch.einsum:
        return _of_equation(args) if not kwargs else None
    names = _NAMES[function]
    given = dict(zip(names, args, strict=False)) | kwargs
    beta, alpha = given.pop("beta", 1), given.pop("alpha", 1)
    if len(args) > len(names) or given.keys() != set(names):
        return None
    if len(names) == 2:
        return MatrixProduct(given[names[0]], given[names[1]])
    if not all(isinstance(factor, (int, float)) for factor in (beta, alpha)):
        return None
    return MatrixProduct(
        given["batch1"], given["batch2"], given["input"], float(beta), float(alpha)
    )


def _of_equation(args: tuple[Any, ...]) -> MatrixProduct | None:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if len(operands) != 2 or not isinstance(equation, str):
        return None
    layout = _layout(equation.replace(" ", ""))
    if layout is None:
        return None
    left, right = operands if not layout.swaps else reversed(operands)
    if len(left.shape) != len(layout.left) or len(right.shape) != len(layout.right):
        return None
    return MatrixProduct(
        _permuted(left, layout.left), _permuted(right, layout.right), order=layout.order
    )


def _permuted(tensor: Any, order: tuple[int, ...]) -> Any:
    return tensor if order == tuple(range(len(order))) else tensor.permute(order)


class _Layout(NamedTuple):
    """How the operands of an equation are permuted to be multiplied as matrices."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    order: tuple[int, ...] | None
    swaps: bool  # whether the equation's second operand is ``left``


@functools.cache
def _layout(equation: str) -> _Layout | None:
    """Return the layout of an equation that is a product of matrices, ``None`` if it is not."""
    inputs, arrow, output = equation.partition("->")
    first, comma, second = inputs.partition(",")
    letters = (first, second, output)
    if not arrow or not comma or any(not part.isalpha() for part in letters):
        return None
    if any(len(set(part)) != len(part) for part in letters):
        return None
    shared = set(first) & set(second)
    summed = shared - set(output)
    batch = shared & set(output)
    rows, columns = set(first) - shared, set(second) - shared
    if not len(summed) == len(rows) == len(columns) == 1 or set(output) != batch | rows | columns:
        return None
    # Scores keep the order of the output, weights that of their own dims.
    swaps = output[-2:] == f"{(*columns,)[0]}{(*rows,)[0]}"
    if swaps:
        first, second, rows, columns = second, first, columns, rows
    (row,), (column,), (inner,) = rows, columns, summed
    if output[-2:] == row + column:
        lead = output[:-2]
    else:
        lead = "".join(letter for letter in first if letter in batch)
    result = f"{lead}{row}{column}"
    order = tuple(result.index(letter) for letter in output)
    return _Layout(
        tuple(first.index(letter) for letter in f"{lead}{row}{inner}"),
        tuple(second.index(letter) for letter in f"{lead}{inner}{column}"),
        None if result == output else order,
        swaps,
    )
