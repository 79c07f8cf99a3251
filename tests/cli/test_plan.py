"""``fusedops plan`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusedops.cli.main import app
from fusedops.planner import PRESETS, Layout, estimate, load_device, preset

H100 = load_device("h100")


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", *args])


def test_the_table_says_what_fits_and_what_does_not() -> None:
    done = invoke("--model", "pangu-13b", "--devices", "8", "--memory", "32GiB")
    assert done.exit_code == 0, done.output
    head, *rest = done.output.splitlines()
    assert head.startswith("pangu-13b: 12.80 B parameters, 1024 tokens x 1 x 8 micro-batches")
    for column in ("weights", "gradients", "states", "activations", "communication", "logits"):
        assert column in rest[1]
    assert "layouts fit" in done.output and "take the first: dp" in done.output
    place = [name.strip() for name in rest[1].split("┃")].index("left")
    left = [line.split("│")[place].strip() for line in rest if line.startswith("│")]
    assert any(float(each) > 0 for each in left) and any(float(each) < 0 for each in left)


def test_json_has_every_layout_and_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    given = ("--model", "gpt2", "--devices", "2", "--memory", "4GB", "--precision", "float32")
    assert invoke(*given, "--json", str(path)).exit_code == 0
    printed = invoke(*given, "--json", "-")
    record = json.loads(path.read_text())
    assert json.loads(printed.output) == record
    assert record["parameters"] == 124_439_808 and record["memory"] == 4 * 10**9
    for row in record["layouts"]:
        layout = Layout.of(**row["layout"] | {"offload": tuple(row["layout"]["offload"])})
        found = estimate(preset("gpt2"), layout, devices=2)
        assert row["bytes"] == found.parts and row["peak"] == found.peak
        assert row["fits"] == (found.peak <= record["memory"])


def test_only_what_is_asked_for_is_tried() -> None:
    done = invoke(
        *("--model", "mixtral-8x7b", "--devices", "16", "--tp", "2", "--ep", "4,8", "--zero", "1"),
        *("--recompute", "full", "--offload", "none", "--pp", "1,2", "--json", "-"),
        *("--schedule", "zbv"),
    )
    rows = json.loads(done.output)["layouts"]
    found = {(row["layout"]["pp"], row["layout"]["ep"]) for row in rows}
    assert found == {(1, 4), (1, 8), (2, 4)} and len(rows) == 3
    assert {each["layout"]["recompute"] for each in rows} == {"full"}
    bubbles = {each["layout"]["pp"]: each["bubble"] for each in rows}
    assert bubbles[1] == 0.0 and 0.0 < bubbles[2] < 1 / 9


def test_a_configuration_of_transformers_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    path.write_text(json.dumps({"model_type": "gpt2"} | sizes))
    for given in (path, tmp_path):
        done = invoke("--model", str(given), "--devices", "1", "--memory", "16GiB", "--json", "-")
        assert json.loads(done.output)["parameters"] == 124_439_808
    path.write_text(json.dumps({"model_type": "gpt2"} | sizes | {"n_layer": 0}))
    done = invoke("--model", str(path))
    assert f"{path}: TransformerConfig: num_layers must be at least 1" in done.output


def test_a_choice_that_is_given_twice_is_tried_once() -> None:
    given = ("--model", "gpt2", "--devices", "1", "--json", "-", "--recompute", "full,full")
    done = invoke(*given, "--offload", "optimizer+optimizer,optimizer")
    assert [row["layout"]["offload"] for row in json.loads(done.output)["layouts"]] == [
        ["optimizer"]
    ]


def test_memory_is_a_size_or_that_of_a_known_device() -> None:
    options = ("--model", "gpt2", "--devices", "1", "--offload", "none", "--json", "-")
    for name, memory in (("h100", H100.memory.usable), ("", 80 * 2**30)):
        record = json.loads(invoke(*options, *(("--device", name) if name else ())).output)
        assert record["memory"] == memory
    both = invoke(*options, "--device", "h100", "--memory", "1GiB")
    assert json.loads(both.output)["memory"] == 2**30


def test_where_nothing_fits_it_says_what_to_do_and_exits_with_1() -> None:
    done = invoke("--model", "pangu-200b", "--devices", "8", "--memory", "32GiB")
    assert done.exit_code == 1
    assert "0 of" in done.output and "such devices would do" in done.output


def test_the_models_are_listed() -> None:
    done = invoke("models")
    assert done.exit_code == 0
    assert all(name in done.output for name in PRESETS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--model is missing: a name (fusedops plan models) or a config.json"),
        (("--model", "/no/config.json"), "cannot read /no/config.json: No such file"),
        (("--model", "pangu13b"), "unknown model 'pangu13b': did you mean pangu-13b?"),
        (("--model", "gpt2", "--memory", "lots"), "'lots' is not a size"),
        (("--model", "gpt2", "--memory", "8 GO"), "unit 'GO' is not known"),
        (("--model", "gpt2", "--memory", "80"), "did you mean 80GiB? (80B would be bytes)"),
        (("--model", "gpt2", "--ep", "8"), "ep must be 1 for a model without experts, got 8"),
        (("--model", "gpt2", "--recompute", ","), "--recompute is empty; known: none, selective"),
        (("--model", "gpt2", "--tp", ","), "--tp is empty"),
        (("--model", "gpt2", "--zero", ""), "--zero is empty"),
        (("--model", "gpt2", "--tp", "9" * 5000), "--tp must be numbers from 1 to 65536"),
        (("--model", __file__), "is no configuration: its name must end in .json"),
        (("--model", str(Path(__file__).parent)), "has no config.json"),
        (("--model", "gpt2", "--precision", "mix"), "did you mean mixed?"),
        (("--model", "gpt2", "--kernels", "fuse"), "did you mean fused?"),
        (("--model", "gpt2", "--recompute", "ful"), "did you mean full?"),
        (("--model", "gpt2", "--offload", "states"), "unknown offload 'states'"),
        (("--model", "gpt2", "--schedule", "zbw"), "did you mean zbv?"),
        (("--model", "gpt2", "--tp", "two"), "--tp must be numbers from 1 to 65536"),
        (("--model", "gpt2", "--zero", "5"), "--zero must be numbers from 0 to 3"),
        (("--model", "gpt2", "--devices", "7"), "must divide the 7 devices"),
        (("--model", "gpt2", "--json", "/no/such/a.json"), "folder /no/such does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], says: str
) -> None:
    done = invoke("--tp", "2", *arguments)
    assert done.exit_code == 2
    errors = [line for line in done.output.splitlines() if "error:" in line]
    assert len(errors) == 1 and says in errors[0], done.output
    assert "Traceback" not in done.output
