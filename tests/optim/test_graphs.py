"""AdamW steps on a GPU: in CUDA graphs, without waiting for it, and what they copy to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import assert_same_bits
from torch import nn

from fusedops.optim import AdamW, clip_grad_norm_

pytestmark = pytest.mark.gpu

Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((7,), (129, 131), (40000,), (0, 4), (), (64, 64))
# Their table is larger than what a driver copies from pageable memory without waiting.
MANY: Shapes = tuple((1 + i,) for i in range(700))
OPTIONS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {"max_norm": 0.5, "skip_non_finite": True, "amsgrad": True}),
    (torch.bfloat16, {"master_weights": True, "max_norm": 0.5}),
    (torch.bfloat16, {"state_dtype": torch.bfloat16}),
]
each_option = pytest.mark.parametrize(
    ("dtype", "options"), OPTIONS, ids=["plain", "clipped", "masters", "rounded"]
)


class Training:
    """Parameters, gradients that are copied from one place, and an optimizer over them."""

    def __init__(
        self,
        dtype: torch.dtype,
        options: dict[str, Any],
        shapes: Shapes = SHAPES,
    ) -> None:
        made = torch.Generator("cuda").manual_seed(1)
        drawn = [torch.randn(shape, generator=made, device="cuda") for shape in shapes]
        self.params = [nn.Parameter(each.to(dtype)) for each in drawn]
        self.sources = [torch.zeros_like(parameter) for parameter in self.params]
        self.lr = torch.tensor(0.01, device="cuda")
        named = [(f"w{i}", each) for i, each in enumerate(self.params)]
        self.optimizer = AdamW(named, lr=self.lr, capturable=True, **options)

    def feed(self, step: int) -> None:
        """Write what the gradients and the learning rate of a step will be."""
        made = torch.Generator("cuda").manual_seed(100 + step)
        for source in self.sources:
            source.copy_(torch.randn(source.shape, generator=made, device="cuda") * 0.1)
        self.lr.fill_(0.01 / (1 + step))

    def step(self, *, anew: bool) -> None:
        """Make a step; ``anew``: with gradients in new memory."""
        for param, source in zip(self.params, self.sources, strict=True):
            if anew or param.grad is None:
                param.grad = source.clone()
            else:
                param.grad.copy_(source)
        self.optimizer.step()

    def state(self) -> list[Any]:
        found = [parameter.detach().clone() for parameter in self.params]
        states = self.optimizer.state_dict()["state"]
        return [found, {key: dict(sorted(value.items())) for key, value in states.items()}]


def captured(training: Training, *, anew: bool) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step(anew=anew)
    return graph


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_option
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("before", [1, 2])
def test_graphs_and_steps_between_them_share_nothing_that_changes(
    dtype: torch.dtype, options: dict[str, Any], anew: bool, before: int
) -> None:
    eager, graphed = Training(dtype, options), Training(dtype, options)
    for training in (eager, graphed):
        for number in range(before):
            training.feed(number)
            training.step(anew=anew)
    graphs = [captured(graphed, anew=anew) for _ in range(2)]
    for number in range(2, 8):
        eager.feed(number)
        eager.step(anew=anew)
        graphed.feed(number)
        if number % 3 == 2:
            graphed.step(anew=anew)
        else:
            graphs[number % 3].replay()
    assert_same_bits(graphed.state(), eager.state())


@each_option
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("shapes", [SHAPES, MANY], ids=["few", "many"])
def test_a_step_does_not_wait_for_the_gpu(
    dtype: torch.dtype, options: dict[str, Any], anew: bool, shapes: Shapes
) -> None:
    training = Training(dtype, options, shapes)
    for number in range(3):
        training.feed(number)
        training.step(anew=anew)
        clip_grad_norm_(training.params, 0.5)
    with nothing_waits():
        for _ in range(3):
            training.step(anew=anew)
            clip_grad_norm_(training.params, 0.5)


@each_option
def test_a_step_of_the_same_tensors_copies_nothing_to_the_gpu(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    training = Training(dtype, options)
    training.feed(0)
    for _ in range(3):
        training.step(anew=False)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        training.step(anew=False)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any("_step_kernel" in name for name in names)
    assert not [name for name in names if "HtoD" in name]
