"""Records which operators a call of a public function reaches, and with what."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RecordOps(TorchDispatchMode):
    """Inside its ``with`` block: the fusedops operators that run, backwards too.

    Attributes:
        calls: operator and all arguments of each, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusedops":
            # The dispatcher leaves trailing defaults out; the checks of the backends need them.
            rest = func._schema.arguments[len(args) :]
            given = kwargs or {}
            filled = [given.get(argument.name, argument.default_value) for argument in rest]
            self.calls.append((func, (*args, *filled)))
        return func(*args, **(kwargs or {}))
