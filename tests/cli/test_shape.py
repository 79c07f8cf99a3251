"""``fusedops bench --shape``: sizes of the user's own; and ``fusedops --version``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fusedops
from fusedops.bench import limits
from fusedops.bench.layers import LAYERS
from fusedops.bench.limits import Limit, Limits
from fusedops.cli.bench.shape import case_of, example
from fusedops.cli.main import app
from fusedops.specs import all_specs
from fusedops.terminal.files import UserError

SPECS = {**all_specs(), **LAYERS}
# What stands for a word in each op that takes one.
WORDS = {"approximate": "tanh", "activation": "gelu", "what": "causal", "target": "capacity"}
WORDS |= {"mask": "causal", "rounding": "hf"}


@pytest.fixture
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the machine need no measuring."""
    known = Limits(Limit(1e9, "copy_", {}), {"float32": Limit(1e12, "torch.mm", {})})
    monkeypatch.setattr(limits, "measure_limits", lambda *_: known)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", *args])


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.bench_case])
def test_every_op_has_the_sizes_that_are_asked_for(name: str) -> None:
    sizes = {"N": "4", "NxN": "2x3", "0.1": "0.0", "true": "true"}
    words = []
    for word in example(SPECS[name]).split(","):
        dimension, placeholder = word.strip("[]").split("=")
        words.append(f"{dimension}={sizes.get(placeholder) or WORDS[dimension]}")
    case = case_of(SPECS[name], ",".join(words))
    sample = case.make(torch.device("cpu"), torch.float32)
    assert sample.tensors and case.bytes_forward(torch.float32) > 0
    SPECS[name].op(*sample.args, **sample.kwargs)


def test_dimensions_go_where_they_belong() -> None:
    for name, text, shape in (
        ("layer_norm", "rows=5, columns=7", (5, 7)),
        ("gelu", "shape=3x5x7,approximate=none", (3, 5, 7)),
        ("baddbmm", "batch=2,rows=3,inner=4,columns=5", (2, 3, 5)),
        ("attention", "batch=2,heads=6,rows=9,size=8,key_heads=3", (2, 6, 9, 8)),
    ):
        sample = case_of(SPECS[name], text).make(torch.device("cpu"), torch.float32)
        assert sample.tensors[0].shape == shape


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["layer_norm", "--shape", "rows=8,cols=4"], "did you mean columns? known: rows, columns"),
        (["layer_norm", "--shape", "rows=8"], "lacks columns: it takes rows=N,columns=N"),
        (["layer_norm", "--shape", "rows=0,columns=4"], "rows must be an integer from 1 on"),
        (["layer_norm", "--shape", "rows=8,rows=4"], "--shape has rows twice"),
        (["layer_norm", "--shape", "8x4"], "--shape must be rows=N,columns=N, got '8x4'"),
        (["gelu", "--shape", "shape=8,0"], "--shape must be shape=NxN,approximate=WORD, got '0'"),
        (["mlp", "--shape", "recompute=yes"], "unknown value of recompute 'yes'"),
        (["add_rms_norm", "--shape", "p=x"], "p must be a number, got 'x'"),
        (["--shape", "rows=8,columns=4"], "--shape needs the names of ops"),
        (["layer_norm", "--shape", "rows=8,columns=4", "--all-sizes"], "--shape needs the names"),
        (["layer_norm", "--seconds", "nan"], "nan is no number of seconds"),
        (["scaling", "--preset", "no-such-model"], "unknown model 'no-such-model'"),
        (["layer_norm", "--sizes", "9x9"], "a size of your own is --shape rows=N,columns=N"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], says: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and says in done.output, done.output
    assert "Traceback" not in done.output


def test_an_op_without_a_shape_says_so() -> None:
    from dataclasses import replace

    with pytest.raises(UserError, match="gelu has no --shape: --sizes chooses one of its sizes"):
        case_of(replace(SPECS["gelu"], bench_case=None), "rows=3")


@pytest.mark.usefixtures("known_limits")
def test_sizes_that_do_not_fit_together_are_a_note() -> None:
    given = ("--quick", "--dtype", "float32", "--seconds", "0.01")
    shape = "batch=1,heads=3,rows=8,size=16,key_heads=2"
    done = invoke("attention", "--shape", shape, *given)
    assert done.exit_code == 0 and "no rows: Number of heads" in done.output
    done = invoke("geglu", "--shape", "rows=2,columns=3,approximate=erf", *given)
    assert done.exit_code == 0 and "no rows: KeyError('erf')" in done.output


@pytest.mark.usefixtures("known_limits")
def test_a_shape_is_measured() -> None:
    done = invoke("gelu", "--shape", "shape=8x16,approximate=tanh", "--quick", "--dtype", "float32")
    assert done.exit_code == 0 and "8x16 tanh" in done.output


def test_the_version_is_told() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output.startswith(f"fusedops {fusedops.__version__} (torch {torch.__version__}")


def test_only_what_is_near_is_suggested() -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "deepseek-v3"])
    assert "unknown model 'deepseek-v3': known: gpt2" in done.output and done.exit_code == 2
    done = CliRunner().invoke(app, ["plan", "--model", "llama3_8b"])
    assert "did you mean llama3-8b?" in done.output
