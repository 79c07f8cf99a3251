"""The transformers of this package, parallelized in drawn ways, train as one process does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from parity_models import MODELS

import fusedops
from fusedops import testing
from fusedops.models import TrainEngine
from fusedops.models.parallelization import batch_partition
from fusedops.parallel.dropout import ShardOffsets

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


@pytest.mark.ci
@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_a_few_of_all_combinations(mesh: dict[str, int]) -> None:
    assert_verified(mesh, 2)


@pytest.mark.parametrize(
    ("mesh", "given"),
    [
        ({"dp": 2}, {"recompute": "full", "microbatches": 2}),
        ({"tp": 2}, {"sp": True}),
        ({"cp": 2}, {"context": "ring"}),
        ({"cp": 2, "tp": 2}, {"context": "all_to_all", "sp": True}),
        ({"pp": 2}, {"microbatches": 2, "recompute": "full"}),
    ],
    ids=str,
)
def test_dropout_draws_what_one_process_does(
    mesh: dict[str, int], given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what ignores places, or numbers by the order of calls, is found."""
    size = {"batch_size": 4, "seq_len": 8}
    case = testing.Case(mesh=mesh, options=given, workload="documents", **size)
    testing.replay(case, MODELS["llama"])
    if "dp" in mesh or "pp" in mesh:
        monkeypatch.setattr(
            TrainEngine, "_dropout_inputs", lambda self, shards, seed: [{}] * len(shards)
        )
    else:
        monkeypatch.setattr(batch_partition, "ShardOffsets", lambda **_: ShardOffsets())
    with pytest.raises(AssertionError, match="loss is"):
        testing.replay(case, MODELS["llama"])


def test_a_few_of_all_combinations_with_stages() -> None:
    for mesh in ({"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "cp": 2}):
        assert_verified(mesh, 1)


def test_offloaded_steps_see_what_clipping_and_later_microbatches_change() -> None:
    given = {"zero": 3, "offload": ("optimizer",), "microbatches": 2}
    case = testing.Case(
        mesh={"dp": 2}, options=given, batch_size=4, seq_len=4, max_norm=0.1, steps=2
    )
    testing.replay(case, MODELS["gpt2"])


def test_a_bias_that_two_meshes_would_divide_unevenly_stays_whole() -> None:
    given = {"mesh": {"dp": 2, "tp": 2}, "options": {"zero": 2}, "batch_size": 4}
    case = testing.Case(**given, workload="documents", seed=41950)
    testing.replay(case, MODELS["bert"])  # head.bias has 19 words


def test_norms_are_made_again_while_their_weights_are_here() -> None:
    given = {"zero": 3, "recompute": "norm"}
    testing.replay(testing.Case(mesh={"dp": 2}, options=given, steps=2), MODELS["bert"])


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


def assert_all_verified(model: str, mesh: dict[str, int], **chosen: list[Any]) -> None:
    """Verify every combination of the options of a mesh, of which some have these values alone."""
    combined = options(mesh) | {"recompute": ["none"], **chosen}
    cases = math.prod(map(len, combined.values()))
    report = fusedops.verify(MODELS[model], [mesh], options=combined, cases=cases, **SIZES)
    print(report)
    assert len(report.passed) == cases, report


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_all_combinations(mesh: dict[str, int], model: str) -> None:
    assert_all_verified(model, mesh, microbatches=[1])


def in_every_way(mesh: dict[str, int]) -> dict[str, list[Any]]:
    """Return the values with which a mesh communicates in all ways, without offload."""
    chosen: dict[str, list[Any]] = {"offload": [()], "microbatches": [1]}
    if "pp" in mesh:
        chosen |= {"microbatches": [2], "pipeline_schedule": ["1f1b", "zero_bubble"]}
        chosen |= {"zero": [0, 3]} if "zero" in options(mesh) else {}
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", STAGES, ids=name)
def test_all_combinations_with_stages(mesh: dict[str, int], model: str) -> None:
    assert_all_verified(model, mesh, **in_every_way(mesh))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [each for each in MESHES + STAGES if each.keys() & {"dp", "cp"}], ids=name
)
def test_all_combinations_with_shared_experts(mesh: dict[str, int]) -> None:
    assert_all_verified("mixtral", mesh, **in_every_way(mesh), ep=[2])
