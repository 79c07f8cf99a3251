"""Training with experts: what balances them is saved, restored and moved once per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import Watching, config, died, resumed, same_bits, whole

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
    died(tmp_path, 5, config(tmp_path, **RUN))
    again = resumed(config(tmp_path, **RUN, parallel={"microbatches": 1}))
    assert again.first == 3
    assert torch.equal(_biases(again), moved) and same_bits(wanted, again)


HASH = MODEL | {"balance_rate": 0.0, "router": "hash", "top_k": 1, "domain_experts": [1, 3]}


def _two_domains(folder: Path) -> dict[str, Any]:
    """Return data of two folders; the letters of a text tell its own."""
    for name, letter in (("zeros", "0"), ("ones", "1")):
        (folder / name).mkdir()
        for number in range(9):
            (folder / name / f"{number}.txt").write_text(letter * (20 + 13 * number))
    train = [str(folder / "zeros"), str(folder / "ones")]
    return {"train": train, "seq_len": 16, "domains": True, "validation_share": 0.3}


def test_each_entry_of_the_corpus_is_a_domain_with_experts_of_its_own(tmp_path: Path) -> None:
    data = _two_domains(tmp_path)
    changes = {"data": data, "model": HASH, "steps": 2, "parallel": {"microbatches": 2}}
    watching = whole(tmp_path, **changes)
    run = watching.run
    assert run.validation is not None
    for sequences in (run.train, run.validation):
        batch = sequences.rows(torch.arange(sequences.count))
        assert batch.domains is not None
        letters = batch.tokens != 256  # but for the ends of files
        assert torch.equal(batch.domains[letters], batch.tokens[letters] - ord("0"))
        assert set(batch.domains.unique().tolist()) == {0, 1}
    weight = run.parallel.model.layers["0"].feed_forward.experts.down_proj
    states = run.optimizer.state[weight]["exp_avg"]
    moved = {expert for expert, state in enumerate(states) if state.any()}
    assert 0 in moved and moved & {1, 2, 3}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no domains": ({"domains": False}, HASH, "domain_experts must be empty without data.domains"),
    "other number": ({}, HASH | {"domain_experts": [4]}, "of 2 numbers, one for each entry"),
    "validation": ({"validation": ["a"]}, HASH, "validation must be as many as train, 2"),
    "file of two": ({}, HASH, r"1.txt must be of one entry of the corpus, got .*zeros"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_domains_that_do_not_fit_are_told(tmp_path: Path, case: str) -> None:
    changes, model, says = REFUSED[case]
    data = _two_domains(tmp_path) | changes
    if case == "file of two":
        data["train"][1] = f"{tmp_path}/**/1.txt"
    with pytest.raises(InputError, match=says):
        train(config(tmp_path, data=data, model=model, steps=1))
