"""The transformers of this package, parallelized in drawn ways, train as one process does."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from parity_models import MODELS, small

import fusedops
from fusedops import testing

# All of dp, cp, tp in {1, 2} but the single process, the smallest first.
MESHES = sorted(
    (
        {name: size for name, size in zip(("dp", "cp", "tp"), sizes, strict=True) if size > 1}
        for sizes in itertools.product((1, 2), repeat=3)
        if sizes != (1, 1, 1)
    ),
    key=len,
)
# The same beside two stages, as far as they fit eight ranks.
STAGES = [{"pp": 2, **mesh} for mesh in ({}, *MESHES) if len(mesh) < 3]
SIZES: dict[str, Any] = {"batch_sizes": (2, 4, 8), "seq_lens": (8, 12, 16)}


def options(mesh: dict[str, int]) -> dict[str, list[Any]]:
    """Return what can be chosen on a mesh."""
    found: dict[str, list[Any]] = {
        "recompute": ["none", "full", "selective"],
        "offload": [(), ("optimizer",), ("activations",)],
        "microbatches": [1, 2],
    }
    if "tp" in mesh:
        found["sp"] = [False, True]
    if "dp" in mesh or "cp" in mesh:
        found["zero"] = [0, 1, 2, 3]
    if "cp" in mesh:
        found["context"] = ["ring", "all_to_all"]
    if "pp" in mesh:
        found["microbatches"] = [2, 4]
        found["pipeline_schedule"] = ["1f1b", "zero_bubble", "gpipe"]
    return found


def assert_verified(mesh: dict[str, int], cases: int) -> None:
    """Verify random options, and once more with micro-batch overlap where a mesh has ``tp``."""
    report = fusedops.verify(MODELS, [mesh], options=options(mesh), cases=cases, **SIZES)
    assert len(report.passed) == cases, report
    if "tp" in mesh:
        pre_norm = {name: model for name, model in MODELS.items() if name != "bert"}
        given = options(mesh) | {"overlap_microbatches": [True]}
        report = fusedops.verify(pre_norm, [mesh], options=given, cases=1, **SIZES)
        assert len(report.passed) == 1, report


def name(mesh: dict[str, int]) -> str:
    return "-".join(mesh)


@pytest.mark.ci(every=4)
@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_a_few_of_all_combinations(mesh: dict[str, int]) -> None:
    assert_verified(mesh, 2)


@pytest.mark.ci
def test_a_few_of_all_combinations_with_stages() -> None:
    for mesh in ({"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "cp": 2}):
        assert_verified(mesh, 1)


def test_experts_over_ranks() -> None:
    report = fusedops.verify(
        MODELS["mixtral"],
        [{"dp": 2}, {"dp": 2, "tp": 2}],
        options={"ep": [2], "zero": [0, 2], "overlap_microbatches": [False, True]},
        cases=4,
        **SIZES,
    )
    assert len(report.passed) == 4, report


def test_models_in_half_precision() -> None:
    two = {"llama": MODELS["llama"], "bert": MODELS["bert"]}
    meshes, half = [{"dp": 2}, {"tp": 2}], (torch.bfloat16,)
    assert fusedops.verify(two, meshes, dtypes=half, cases=4, **SIZES)


@pytest.mark.distributed
def test_gloo_processes() -> None:
    report = fusedops.verify(
        MODELS["llama"],
        [{"dp": 2}, {"tp": 2}],
        options={"zero": [0, 3]},
        cases=2,
        ranks="processes",
        **SIZES,
    )
    assert report, report


def in_every_way(mesh: dict[str, int]) -> dict[str, list[Any]]:
    """Return the values with which a mesh communicates in all ways, without offload."""
    chosen: dict[str, list[Any]] = {"offload": [()], "microbatches": [1]}
    if "pp" in mesh:
        chosen |= {"microbatches": [2], "pipeline_schedule": ["1f1b", "zero_bubble"]}
        chosen |= {"zero": [0, 3]} if "zero" in options(mesh) else {}
    return chosen


COMBINED = [(model, mesh, {"microbatches": [1]}) for model in MODELS for mesh in MESHES]
COMBINED += [(model, mesh, in_every_way(mesh)) for model in MODELS for mesh in STAGES]
COMBINED += [
    ("mixtral", mesh, in_every_way(mesh) | {"ep": [2]})
    for mesh in MESHES + STAGES
    if mesh.keys() & {"dp", "cp"}
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "chosen"), COMBINED, ids=str)
def test_all_combinations(model: str, mesh: dict[str, int], chosen: dict[str, list[Any]]) -> None:
    """Verify every combination of the options of a mesh, of which some have these values alone."""
    combined = options(mesh) | {"recompute": ["none"], **chosen}
    cases = math.prod(map(len, combined.values()))
    report = fusedops.verify(MODELS[model], [mesh], options=combined, cases=cases, **SIZES)
    print(report)
    assert len(report.passed) == cases, report


DOCUMENTS: dict[str, Any] = {"workload": "documents"}
RECOMPUTED = {"ep": 2, "zero": 3, "recompute": "full", "microbatches": 2}
ULYSSES: dict[str, Any] = {"context": "all_to_all"}
SLICED = {"recompute": "full", "recompute_slice_activation": True}
OFFLOADED = {"sp": True, "offload": ("activations", "optimizer")}
TWO_PASSES = {"pipeline_schedule": "zero_bubble", "microbatches": 2, "sp": True}
# Model, mesh, options, sequences of the batch, and what else is special about the case. All but
# those of ``PLAIN`` have micro-batch overlap.
PLAIN: dict[str, Any] = {"overlap_microbatches": False}
REPEATED = PLAIN | {"recompute": "full", "microbatches": 2}
LATER = PLAIN | {"zero": 3, "offload": ("optimizer",), "microbatches": 2}
STEPS: dict[str, tuple[str, dict[str, int], dict[str, Any], int, dict[str, Any]]] = {
    "one-sequence": ("llama", {"tp": 2}, {}, 1, DOCUMENTS),
    "three": ("gpt2", {"tp": 2}, {"sp": True, "recompute": "full"}, 3, {}),
    "one-sequence-of-experts": ("mixtral", {"dp": 2, "tp": 2}, {"ep": 2, "sp": True}, 2, DOCUMENTS),
    "one-sequence-on-a-ring": ("mixtral", {"cp": 2}, {"ep": 2}, 1, DOCUMENTS),
    "one-sequence-of-heads": ("mixtral", {"cp": 2}, ULYSSES | {"ep": 2}, 1, DOCUMENTS),
    "experts-on-nodes": ("mixtral", {"dp": 4}, {"ep": 4, "ep_nodes": 2, "ep_chunks": 2}, 8, {}),
    "experts-recomputed-zero3": ("mixtral", {"dp": 4}, RECOMPUTED, 24, {}),
    "sliced": ("gpt2", {"tp": 2}, SLICED, 2, {}),
    "offloaded": ("gpt2", {"tp": 2, "cp": 2}, OFFLOADED, 2, {}),
    "selective": ("llama", {"dp": 2, "tp": 2}, {"recompute": "selective"}, 4, {}),
    "pipeline-in-two-passes": ("llama", {"pp": 2, "tp": 2}, TWO_PASSES, 4, {}),
    "pipeline-experts": ("mixtral", {"pp": 2, "dp": 2}, {"ep": 2, "microbatches": 2}, 8, {}),
    "dropout-dp": ("llama", {"dp": 2}, REPEATED, 4, DOCUMENTS),
    "dropout-pp": ("llama", {"pp": 2}, REPEATED, 4, DOCUMENTS),
    "dropout-tp": ("llama", {"tp": 2}, PLAIN | {"sp": True}, 4, DOCUMENTS),
    "dropout-ring": ("llama", {"cp": 2}, PLAIN, 4, DOCUMENTS),
    "dropout-heads": ("llama", {"cp": 2, "tp": 2}, PLAIN | ULYSSES | {"sp": True}, 4, DOCUMENTS),
    "clipped-later": ("gpt2", {"dp": 2}, LATER, 4, {"seq_len": 4, "max_norm": 0.1, "steps": 2}),
    # head.bias has 19 words, which the two meshes would divide unevenly.
    "uneven": ("bert", {"dp": 2, "tp": 2}, PLAIN | {"zero": 2}, 4, DOCUMENTS | {"seed": 41950}),
    # Norms are made again while their weights are here.
    "norms": ("bert", {"dp": 2}, PLAIN | {"zero": 3, "recompute": "norm"}, 2, {"steps": 2}),
}


@pytest.mark.ci(every=3)
@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_that_of_one_process(case: str) -> None:
    name, mesh, options, batch_size, more = STEPS[case]
    given = {"mesh": mesh, "options": {"overlap_microbatches": True, **options}, "seq_len": 8}
    testing.replay(testing.Case(batch_size=batch_size, **given | more), MODELS[name])


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
