"""Offload moves what a forward makes, and no weights, in whatever form layers read them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import fusedops
from fusedops import memory
from fusedops.models import ParallelConfig, Transformer, parallelize, preset
from fusedops.ops._weight_gradients import summed
from fusedops.runtime.copy_engine import HostCopyEngine
from fusedops.testing import threads


class _Told(HostCopyEngine):
    """Knows the memory that was copied, each way."""

    def __init__(self) -> None:
        super().__init__()
        self.left: set[int] = set()
        self.came: dict[int, torch.UntypedStorage] = {}

    def copy(self, source: Any, target: Any, *, to_host: bool, after: Any = None) -> Any:
        if to_host:
            self.left.add(source.untyped_storage()._cdata)
        else:
            self.came[target.untyped_storage()._cdata] = target.untyped_storage()
        return super().copy(source, target, to_host=to_host, after=after)


def _settings(engine: HostCopyEngine) -> memory.OffloadSettings:
    return memory.OffloadSettings(least_bytes=1, engine=lambda device: engine)


def _left(rank: int, name: str, dtype: torch.dtype, values: dict[str, Any]) -> tuple[int, set[str]]:
    """Return how many tensors left, and which weights among them."""
    whole = Transformer(replace(preset(name), num_layers=1), device="meta", dtype=dtype)
    run = parallelize(whole, ParallelConfig(**values), seed=0)
    engine, model = _Told(), run.model
    memory.apply(
        model, memory.Policy(memory.offload("layers.*")), offload_settings=_settings(engine)
    )
    tokens = run.rows(torch.arange(4 * run.data_ranks)[:, None] + torch.arange(8))
    shard = run.shard_batch(tokens, tokens)
    run.step([shard], run.count(shard.labels))
    weights = {
        getattr(parameter, "_local_tensor", parameter).untyped_storage()._cdata: name
        for name, parameter in model.named_parameters()
    }
    return len(engine.left), {weights[each] for each in engine.left & weights.keys()}


SPREAD: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "tp2": ("tiny-llama", torch.float32, {"tp": 2}),
    "ep2": ("tiny-mixtral", torch.float32, {"dp": 2, "ep": 2}),
    "ep2-chunks-half": ("tiny-mixtral", torch.bfloat16, {"dp": 2, "ep": 2, "ep_chunks": 2}),
    "overlap-half": (
        "tiny-mixtral",
        torch.bfloat16,
        {"dp": 2, "ep": 2, "overlap_microbatches": True},
    ),
}


@pytest.mark.parametrize("case", SPREAD)
def test_no_weight_to_host(case: str) -> None:
    for count, weights in threads.run(_left, 2, *SPREAD[case]):
        assert count > 5 and not weights


def test_experts_that_are_brought_from_the_host_do_not_leave() -> None:
    """Their memory is let go behind the layer: a copy under way would read what is not there."""
    torch.manual_seed(0)
    kept = fusedops.nn.MoE(16, 32, 6, 2, dtype=torch.bfloat16)
    layer, brings, moves = copy.deepcopy(kept), _Told(), _Told()
    memory.store_experts(layer, "cpu", settings=_settings(brings))
    memory.apply(layer, memory.Policy(memory.offload("")), offload_settings=_settings(moves))
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    for each in (kept, layer):
        with summed(True):
            output = each(x)
        output.square().sum().backward()
    assert moves.left and not moves.left & brings.came.keys()
    for mine, theirs in zip(layer.parameters(), kept.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
