"""AdamW's Triton kernels on CPU tensors: what would be launched is counted, and does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fusedops
from fusedops._core import env, extension
from fusedops.kernels import adamw, square_sums


class Launches:
    """Stands for a Triton kernel: keeps the arguments of the last launch, if anything."""

    def __init__(self, seen: Callable[..., None] | None = None) -> None:
        self.count = 0
        self._seen = seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        if self._seen is not None:
            self._seen(*args, **kwargs)


@contextlib.contextmanager
def stand_in(step: Launches | None = None) -> Iterator[None]:
    """Let the optimizer's Triton kernels serve CPU tensors, and do nothing.

    Args:
        step: what is launched for the step itself; by default nothing.
    """
    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (extension, "triton_missing", lambda: None),
            (env, "triton_interpreted", lambda: True),
            (adamw, "_step_kernel", step or Launches()),
            (adamw, "_count_kernel", Launches()),
            (square_sums, "_parts_kernel", Launches()),
            (square_sums, "_sums_kernel", Launches()),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        patches.enter_context(fusedops.use_backend("triton"))
        yield
