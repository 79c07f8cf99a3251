"""Training with experts: what balances them is saved, restored and moved once per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import Died, Watching, config, die, same_bits, whole

from fusedops.train import InputError, train

MODEL: dict[str, Any] = {
    "preset": "tiny-mixtral",
    "num_layers": 1,
    "balance_loss": 0.0,
    "balance_rate": 0.01,
    "shared_size": 32,
}
RUN: dict[str, Any] = {"model": MODEL, "steps": 6, "checkpoint": {"every": 3}}


def _biases(run: Watching) -> torch.Tensor:
    return run.run.parallel.model.layers["0"].feed_forward.gate.e_score_correction_bias


def test_biases_go_on_where_a_run_died(tmp_path: Path) -> None:
    wanted = whole(tmp_path, **RUN)
    moved = _biases(wanted)
    # So many steps of the rate, up and down.
    assert moved.abs().max() > 0
    assert torch.equal((moved / 0.01).round().abs() <= 6, torch.ones(4, dtype=torch.bool))
    with pytest.raises(Died):
        train(config(tmp_path, **RUN), watcher=Watching(5, die))
    resumed = Watching()
    train(config(tmp_path, **RUN, parallel={"microbatches": 1}), watcher=resumed)
    assert resumed.first == 3
    assert torch.equal(_biases(resumed), moved) and same_bits(wanted, resumed)


def test_domains_that_no_file_tells_are_refused(tmp_path: Path) -> None:
    model = MODEL | {"balance_rate": 0.0, "router": "hash", "top_k": 1, "domain_experts": [2, 2]}
    with pytest.raises(InputError, match="domain_experts must be empty: files do not tell"):
        train(config(tmp_path, **RUN | {"model": model}))
