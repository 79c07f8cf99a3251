"""The examples of trainers, and the tutorials that need one, have the losses of stock models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Packages that would change the other tests' environment: `make test-clients` puts them there.
MORE = ROOT / "build" / "clients" / "more"
VISION = ROOT / "build" / "clients" / "vision"
CALLS = r"fused calls: (\d+)"
LOSS = r"^loss ([\d.]+)$"
COUNTED = Path(__file__).with_name("run_counted.py")
FOLDERS = {"litgpt_fabric": MORE, "torchtitan_llama": MORE, "timm_vit": VISION}
TRAINERS = sorted(path.stem for path in (EXAMPLES / "trainers").glob("*.py"))


def run(script: Path, folder: Path, *arguments: str) -> str:
    """Return what a script prints in an empty folder; it must succeed."""
    packages = FOLDERS.get(script.stem)
    if packages is not None and not packages.is_dir():
        pytest.skip(f"{packages} does not exist: `make test-clients` makes it")
    command = [sys.executable]
    if script.stem == "deepspeed_zero":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    path = [*given, str(ROOT), str(ROOT / "tools"), *([str(packages)] if packages else [])]
    folder.mkdir()
    done = subprocess.run(
        [*command, str(COUNTED), str(script), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(LOSS, output, re.MULTILINE)]


@pytest.mark.parametrize("name", TRAINERS)
def test_the_example_trains_as_the_stock_model(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / "trainers" / f"{name}.py"
    fused, stock = (run(script, tmp_path / word, word) for word in ("fused", "stock"))
    expected = losses(stock)
    assert len(expected) == 10 and expected[-1] < expected[0]
    assert losses(fused) == pytest.approx(expected, abs=2e-4)
    assert set(re.findall(CALLS, stock)) == {"0"}
    assert min(int(calls) for calls in re.findall(CALLS, fused)) > 10


def test_preference_tuning_has_the_losses_of_stock(tmp_path: Path) -> None:
    output = run(EXAMPLES / "preference_tuning.py", tmp_path / "run")
    pairs = re.findall(r"loss: stock ([\d.]+), fused ([\d.]+)", output)
    assert len(pairs) == 3
    for stock, fused in pairs:
        assert float(fused) == pytest.approx(float(stock), abs=2e-4)
    assert re.search(r"(9\d|100)% of prompts that were not trained on", output)
    assert re.search(r"\d+ of \d+ modules replaced", output)


def test_lora_trains_saves_and_merges(tmp_path: Path) -> None:
    output = run(EXAMPLES / "lora.py", tmp_path / "run")
    pairs = re.findall(r"loss: stock ([\d.]+), patched ([\d.]+)", output)
    assert len(pairs) == 3 and float(pairs[-1][0]) < float(pairs[0][0])
    for stock, patched in pairs:
        assert float(patched) == pytest.approx(float(stock), abs=2e-4)
    loaded = re.findall(r"saved adapter, in a stock model: ([\d.]+)", output)
    merged = re.findall(r"loss of the merged model: ([\d.]+)", output)
    assert float(merged[0]) == pytest.approx(float(loaded[0]), abs=2e-4)
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").exists()
