"""The comparison of transformers' own tests: what it counts, what it lets pass, what it refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import hf_model_tests as command

TINY = """
import copy, pathlib, unittest
import torch
from transformers import BertConfig, BertForMaskedLM

CONFIG = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                    intermediate_size=48, max_position_embeddings=40)
IDS = torch.arange(12).view(2, 6)

class BertModelTest(unittest.TestCase):
    def test_forward(self):
        BertForMaskedLM(CONFIG)(IDS)

    def test_loaded(self):
        folder = pathlib.Path(__file__).parent / "saved"
        BertForMaskedLM(CONFIG).save_pretrained(folder)
        model, info = BertForMaskedLM.from_pretrained(folder, output_loading_info=True)
        model(IDS)
        assert not info["missing_keys"]

    def test_exact_class(self):
        model = BertForMaskedLM(CONFIG)
        model(IDS)
        assert type(model.bert.encoder.layer[0].intermediate).__name__ == "BertIntermediate"
        assert type(model.bert.encoder.layer[0].intermediate).__qualname__ == "BertIntermediate"
        assert type(model.bert.encoder.layer[0].intermediate).__mro__[1] is torch.nn.Module

    def test_of_the_weights(self):
        assert BertForMaskedLM(CONFIG).num_parameters() > 0

    def test_that_fails_stock(self):
        assert False

    @unittest.skip("not for this model")
    def test_skipped(self):
        pass
"""
CLASS = "tests/models/bert/test_modeling_bert.py::BertModelTest::"


def runs_of(tree: Path, select: str | None = None) -> list[dict[str, dict]]:
    """Return the outcomes of a small test file, stock and patched."""
    command.write(tree / command.test_file("bert"), TINY)
    return [
        command.run(
            tree, "bert", patched=each, outcomes=tree / f"{each}.jsonl", select=select, limit=300
        )
        for each in (False, True)
    ]


@pytest.mark.slow
def test_what_passes_stock_and_fails_patched_is_new_or_known(tmp_path: Path) -> None:
    stock, patched = runs_of(tmp_path)
    assert not any(each["ops"] for each in stock.values())
    for name in ("test_forward", "test_loaded"):
        assert patched[CLASS + name]["outcome"] == "passed"
        assert patched[CLASS + name]["ops"]["attention"] == 1
    result = command.compare(stock, patched, known=[])
    assert (result.passed_stock, result.passed_patched, result.with_fused_ops) == (4, 3, 2)
    assert list(result.new) == [CLASS + "test_exact_class"]
    assert result.new[CLASS + "test_exact_class"].startswith("failed: AssertionError")
    assert result.ops["attention"] == 3
    pattern = "*::BertModelTest::test_exact_*"
    known = [command.Known(pattern, "AssertionError", "the class is ours")]
    result = command.compare(stock, patched, known=known)
    assert not result.new
    assert result.known == {CLASS + "test_exact_class": "the class is ours"}


@pytest.mark.slow
def test_a_family_without_tests_to_run_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs_of(tmp_path, "no_such_test") == [{}, {}]
    monkeypatch.setitem(globals(), "TINY", "import no_such_module")
    with pytest.raises(SystemExit, match="no_such_module"):
        runs_of(tmp_path, "no_such_test")


# How a test that passes stock ends patched, and what is new of that.
PATCHED = {
    "unfinished": ({"outcome": "unfinished"}, {"a": "unfinished: "}),
    "not run": (None, {"a": "not run: "}),
    "other failure": ({"outcome": "failed", "reason": "KeyError: 1"}, {"a": "failed: KeyError: 1"}),
    "known failure": ({"outcome": "failed", "reason": "ValueError: 1"}, {}),
}


@pytest.mark.parametrize(("outcome", "new"), PATCHED.values(), ids=PATCHED)
def test_whatever_is_not_known_is_new(outcome: dict[str, str] | None, new: dict[str, str]) -> None:
    stock = {"a": {"outcome": "passed", "ops": {}}}
    known = [command.Known("a", "ValueError", "refused")]
    result = command.compare(stock, {} if outcome is None else {"a": outcome}, known)
    assert result.new == new and bool(result.known) == (not new)


def test_lines_of_one_test_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "outcomes"
    path.write_text(
        '{"test": "a", "outcome": "unfinished"}\n'
        '{"test": "a", "outcome": "failed", "ops": {"gelu": 2}}\n'
        '{"test": "a", "outcome": "passed", "ops": {"gelu": 1}}\n'
    )
    outcome = command.read_outcomes(path)["a"]
    assert (outcome["outcome"], outcome["ops"]) == ("passed", {"gelu": 3})


def test_every_family_has_models_that_transformers_knows() -> None:
    assert len(command.FAMILIES) >= 60
    for family, groups in command.FAMILIES.items():
        assert importlib.util.find_spec(f"transformers.models.{family}.modeling_{family}")
        for group in groups:
            assert group.classes(), group.name


def test_a_folder_without_tests_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hf_model_tests.py", "--tests", str(tmp_path)])
    with pytest.raises(SystemExit) as exit:
        command.main()
    assert exit.value.code == 2
    assert "is no checkout of transformers" in capsys.readouterr().err
