"""Plans of the solver cost no more than those of the search over segments that it replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from foreign_models import MODELS


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., Any]]:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["encoder", "gpt2", "llama"])
@pytest.mark.parametrize("share", [None, 0.8, 0.6])
def test_solver_costs_no_more_than_the_segments(
    fake_mesh: Callable[..., Any], name: str, share: float | None
) -> None:
    from fusedops.planner import load_device
    from fusedops.planner.sharding.apply import evaluator_for
    from fusedops.planner.sharding.search import PlacementSearch
    from fusedops.planner.sharding.solver import solve, units_of
    from fusedops.planner.sharding.trace import FakeModel

    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs, _ = MODELS[name]()
    for names in (("tp",), ("dp", "tp")):
        mesh = fake_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        evaluator = evaluator_for(FakeModel(model, "cpu"), mesh, load_device("h100"), (), inputs)
        numbers = {name: number for number, name in evaluator.graph.parameters.items()}

        def total_of(
            placements: dict[str, Any], own: Any = evaluator, known: Any = numbers
        ) -> tuple[float, float]:
            stored = {known[name]: place for name, place in placements.items()}
            cost, memory = own.total(stored)
            return cost.seconds, memory

        old = PlacementSearch(evaluator, {}, "seconds", share is not None)
        limit = None
        if share is not None:
            free = old.run(None)
            assert free is not None
            limit = share * total_of(free.placements)[1]
        before = old.run(limit)
        after = solve(evaluator, units_of(evaluator, {}, share is not None), "seconds", limit)
        if before is None:
            continue
        assert after is not None
        assert total_of(after.placements)[0] <= total_of(before.placements)[0] * (1 + 1e-9)
