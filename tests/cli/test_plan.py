"""``fusedops plan`` from the command line."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

from bench_records import invoke

from fusedops.models import to_config
from fusedops.planner import PRESETS, Layout, estimate, load_device, preset

plan = partial(invoke, "plan")
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_the_table_says_what_fits_and_what_does_not() -> None:
    done = plan("--model", "pangu-13b", "--devices", "8", "--memory", "32GiB")
    assert done.exit_code == 0, done.output
    head, *rest = done.output.splitlines()
    assert head.startswith("pangu-13b: 12.80 B parameters, 1024 tokens x 1 x 8 micro-batches")
    for column in ("weights", "gradients", "states", "activations", "communication", "logits"):
        assert column in rest[1]
    assert "take the first: dp" in done.output
    fits = re.search(r"\d+ of \d+ layouts fit", done.output)
    assert fits is not None and fits[0] in PAGE.read_text()
    place = [name.strip() for name in rest[1].split("┃")].index("left")
    left = [line.split("│")[place].strip() for line in rest if line.startswith("│")]
    assert any(float(each) > 0 for each in left) and any(float(each) < 0 for each in left)


def test_json_has_every_layout_and_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    given = ("--model", "gpt2", "--devices", "2", "--memory", "4GB", "--precision", "float32")
    assert plan(*given, "--json", str(path)).exit_code == 0
    printed = plan(*given, "--json", "-")
    record = json.loads(path.read_text())
    assert json.loads(printed.output) == record
    assert record["parameters"] == 124_439_808 and record["memory"] == 4 * 10**9
    for row in record["layouts"]:
        layout = Layout.of(**row["layout"] | {"offload": tuple(row["layout"]["offload"])})
        found = estimate(preset("gpt2"), layout, devices=2)
        assert row["bytes"] == found.parts and row["peak"] == found.peak
        assert row["fits"] == (found.peak <= record["memory"])


def test_only_what_is_asked_for_is_tried() -> None:
    done = plan(
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
        done = plan("--model", str(given), "--devices", "1", "--memory", "16GiB", "--json", "-")
        assert json.loads(done.output)["parameters"] == 124_439_808
    path.write_text(json.dumps({"model_type": "gpt2"} | sizes | {"n_layer": 0}))
    done = plan("--model", str(path))
    assert f"{path}: TransformerConfig: num_layers must be at least 1" in done.output
    path.write_text(json.dumps(to_config(preset("tiny-deepseek"))))
    done = plan("--model", str(path))
    assert done.exit_code == 2 and "no formulas for models with kv_lora_rank, got 24" in done.output


def test_a_choice_that_is_given_twice_is_tried_once() -> None:
    given = ("--model", "gpt2", "--devices", "1", "--json", "-", "--recompute", "full,full")
    done = plan(*given, "--offload", "optimizer+optimizer,optimizer")
    assert [row["layout"]["offload"] for row in json.loads(done.output)["layouts"]] == [
        ["optimizer"]
    ]


def test_memory_is_a_size_or_that_of_a_known_device() -> None:
    options = ("--model", "gpt2", "--devices", "1", "--offload", "none", "--json", "-")
    for name, memory in (("h100", load_device("h100").memory.usable), ("", 80 * 2**30)):
        record = json.loads(plan(*options, *(("--device", name) if name else ())).output)
        assert record["memory"] == memory
    both = plan(*options, "--device", "h100", "--memory", "1GiB")
    assert json.loads(both.output)["memory"] == 2**30


def test_where_nothing_fits_it_says_what_to_do_and_exits_with_1() -> None:
    done = plan("--model", "pangu-200b", "--devices", "8", "--memory", "32GiB")
    assert done.exit_code == 1
    assert "0 of" in done.output and "such devices would do" in done.output


def test_the_models_are_listed() -> None:
    done = plan("models")
    assert done.exit_code == 0
    assert all(name in done.output for name in PRESETS)
