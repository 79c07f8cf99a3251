"""Fused ops and patched models as ONNX files, run by onnxruntime, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedops.specs import Sample, all_specs, tensors_in
from fusedops.specs.comparison import baseline, difference, fresh, truth

pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
pytest.importorskip("onnxruntime", reason="runs the files that are written")

import onnxruntime
from exported_models import MODELS, SIZES
from patch_testing import assert_close, patched_pair

from fusedops.integrations.onnx import export

# torch's own, of which pytest would show hundreds.
pytestmark = pytest.mark.filterwarnings("ignore")

# What a graph for inference can hold.
OPS = (
    *("add_layer_norm", "add_rms_norm", "attention", "baddbmm", "bias_dropout_add", "bias_gelu"),
    *("cross_entropy", "geglu", "gelu", "grouped_mm", "layer_norm", "linear_act", "linear_glu"),
    *("mlp", "moe_mlp", "moe_permute", "moe_route", "moe_sort", "moe_unpermute", "rms_norm"),
    *("rotary_embedding", "scaled_masked_softmax", "swiglu"),
)
# Standard operators for the whole of what an op computes.
WHOLE = {
    "Attention": ("GPT2", "Llama", "Mixtral", "Bert", "T5", "ViT"),
    "RMSNormalization": ("Llama", "Qwen3", "Mixtral", "Qwen3Moe", "T5"),
    "LayerNormalization": ("GPT2", "Bert", "ViT"),
    "Gelu": ("GPT2", "Bert", "ViT"),
}


class Call(torch.nn.Module):
    """A sample as a module of its tensors."""

    def __init__(self, op: Any, sample: Sample) -> None:
        super().__init__()
        self.op, self.sample = op, sample

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        call = self.sample.map(lambda tensor: next(given))
        return tensors_in(self.op(*call.args, **call.kwargs))


def run(path: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = {entry.name for entry in session.get_inputs()}
    feeds = dict(zip(_names(len(inputs)), (each.numpy() for each in inputs), strict=True))
    found = session.run(None, {name: value for name, value in feeds.items() if name in names})
    return [torch.from_numpy(each) for each in found]


def _names(count: int) -> list[str]:
    return [f"input_{index}" for index in range(count)]


def assert_standard(program: Any) -> None:
    """Raise unless all operators are of the standard."""
    nodes = list(program.model.graph.all_nodes())
    assert {node.domain for node in nodes} <= {"", "ai.onnx"}
    assert not program.model.functions


# What onnxruntime refuses to run on tensors without elements: its Attention without queries, its
# Where of a scalar and no rows.
NOT_EMPTY = ("attention", "cross_entropy")


def samples(name: str) -> list[Sample]:
    """Return the calls that draw nothing and drop no slot of a router."""
    found = all_specs()[name].samples(torch.device("cpu"), torch.float32)
    dropping = {"capacity_factor", "expert_choice"}
    return [
        fresh(each).map(torch.Tensor.detach)
        for each in found
        if not each.random
        and dropping.isdisjoint(each.kwargs)
        and (name not in NOT_EMPTY or all(tensor.numel() > 0 for tensor in each.tensors))
    ]


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_within_its_error_budget(name: str, tmp_path: Path) -> None:
    spec = all_specs()[name]
    for sample in samples(name):
        inputs = sample.tensors
        path = tmp_path / f"{sample.name}.onnx"
        program = export(
            Call(spec.op, sample), inputs, path, input_names=_names(len(inputs)), verbose=False
        )
        assert_standard(program)
        with torch.no_grad():
            exact, eager = truth(spec, sample).outputs, baseline(spec, fresh(sample)).outputs
        for each in zip(run(path, inputs), exact, eager, strict=True):
            found = difference(*each, spec.depth(sample).outputs, spec.inner_dtype(sample))
            assert found is None, f"{sample.name}: {found}"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_serves_other_sizes_than_it_was_made_with(name: str, tmp_path: Path) -> None:
    kind = MODELS[name]
    patched, stock = kind.pair()
    path = tmp_path / "model.onnx"
    inputs = kind.of(*SIZES[0])
    options = {"dynamic_shapes": kind.dynamic, "input_names": _names(len(inputs))}
    program = export(patched, inputs, path, verbose=False, **options)
    assert_standard(program)
    operators = {node.op_type for node in program.model.graph.all_nodes()}
    assert {each for each, models in WHOLE.items() if name in models} <= operators
    for size in SIZES:
        (found,) = run(path, kind.of(*size))
        with torch.no_grad():
            assert_close(found, stock(*kind.of(*size)))


class Block(torch.nn.Module):
    """torch's own modules that have a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.activation = torch.nn.LayerNorm(8), torch.nn.GELU()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.last = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.down(self.activation(self.up(self.norm(x)))))


# The older exporter has no aten::diff, of which transformers makes masks, patched or not.
@pytest.mark.parametrize(
    ("name", "dynamo"),
    [
        *((name, True) for name in ("Block", "Llama", "GPT2", "ViT")),
        ("Block", False),
        ("ViT", False),
    ],
)
def test_torchs_own_exporters_take_patched_models(name: str, dynamo: bool, tmp_path: Path) -> None:
    inputs: tuple[torch.Tensor, ...] = (torch.randn(4, 8),)
    if name == "Block":
        patched, stock = patched_pair(Block().eval())
    else:
        patched, stock = MODELS[name].pair()
        inputs = MODELS[name].of(*SIZES[0])
    path = tmp_path / "model.onnx"
    names = _names(len(inputs))
    torch.onnx.export(patched, inputs, path, dynamo=dynamo, input_names=names, verbose=False)
    (found,) = run(path, inputs)
    with torch.no_grad():
        assert_close(found, stock(*inputs))
