"""Micro-batch overlap gives the step of one process in all layouts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from parity_models import MODELS, small

import fusedops
from fusedops import testing

DOCUMENTS = {"workload": "documents"}
RECOMPUTED = {"ep": 2, "zero": 3, "recompute": "full", "microbatches": 2}
SLICED = {"recompute": "full", "recompute_slice_activation": True}
OFFLOADED = {"sp": True, "offload": ("activations", "optimizer")}
TWO_PASSES = {"pipeline_schedule": "zero_bubble", "microbatches": 2, "sp": True}
# Model, mesh, options, sequences of the batch, and what else is special about it.
STEPS: dict[str, tuple[str, dict[str, int], dict[str, Any], int, dict[str, Any]]] = {
    "one-sequence": ("llama", {"tp": 2}, {}, 1, DOCUMENTS),
    "three": ("gpt2", {"tp": 2}, {"sp": True, "recompute": "full"}, 3, {}),
    "one-sequence-of-experts": ("mixtral", {"dp": 2, "tp": 2}, {"ep": 2, "sp": True}, 2, DOCUMENTS),
    "one-sequence-on-a-ring": ("mixtral", {"cp": 2}, {"ep": 2}, 1, DOCUMENTS),
    "one-sequence-of-heads": (
        "mixtral",
        {"cp": 2},
        {"ep": 2, "context": "all_to_all"},
        1,
        DOCUMENTS,
    ),
    "experts-on-nodes": ("mixtral", {"dp": 4}, {"ep": 4, "ep_nodes": 2, "ep_chunks": 2}, 8, {}),
    "experts-recomputed-zero3": ("mixtral", {"dp": 4}, RECOMPUTED, 24, {}),
    "sliced": ("gpt2", {"tp": 2}, SLICED, 2, {}),
    "offloaded": ("gpt2", {"tp": 2, "cp": 2}, OFFLOADED, 2, {}),
    "selective": ("llama", {"dp": 2, "tp": 2}, {"recompute": "selective"}, 4, {}),
    "pipeline-in-two-passes": ("llama", {"pp": 2, "tp": 2}, TWO_PASSES, 4, {}),
    "pipeline-experts": ("mixtral", {"pp": 2, "dp": 2}, {"ep": 2, "microbatches": 2}, 8, {}),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_that_of_one_process(case: str) -> None:
    name, mesh, options, batch_size, more = STEPS[case]
    given = {"mesh": mesh, "options": {"overlap_microbatches": True, **options}, "seq_len": 8}
    testing.replay(testing.Case(batch_size=batch_size, **given, **more), MODELS[name])


def _mean_of_halves(layer: Any, halves: Any, context: Any) -> Any:
    losses = [layer.auxiliary_loss(*half, context) for half in halves if half]
    return sum(losses) / len(losses) if losses else None


def test_verify_finds_a_loss_of_routers_that_is_a_mean_of_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factory = partial(small, "tiny-mixtral", num_layers=1, balance_loss=0.01)
    given: dict[str, Any] = {"options": {"overlap_microbatches": [True], "ep": [2]}, "cases": 1}
    sizes: dict[str, Any] = {"batch_sizes": (4,), "seq_lens": (4,)}
    assert fusedops.verify(factory, [{"dp": 2}], **given, **sizes)
    monkeypatch.setattr(
        "fusedops.models.parallelization.microbatch_overlap._auxiliary_loss", _mean_of_halves
    )
    with pytest.raises(testing.ParityError, match=r"gradient layers\.0"):
        fusedops.verify(factory, [{"dp": 2}], **given, **sizes)
