"""The scripts of the tutorials do what their pages promise, and the pages show their code.

The scripts that need trl and peft are run by tests/clients/test_examples.py, the notebooks by
test_notebooks.py.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.utils
import tutorials
from comparing import assert_all_close, assert_same_bits

import fusedops

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(command)`` returns what a command prints in an empty folder; it must succeed."""

    def run_command(*command: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        for name in ("FUSEDOPS_BACKEND", "TRITON_INTERPRET"):
            environment.pop(name, None)
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run_command


def script(name: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py")]


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def outputs_of(name: str) -> list[str]:
    """Return the outputs that a page shows."""
    parts = tutorials.parts_of((tutorials.PAGES / f"{name}.md").read_text())
    blocks = [part for part in parts if isinstance(part, tutorials.Block)]
    return [block.output for block in blocks if block.output is not None]


def test_every_script_has_a_page_in_the_index() -> None:
    # Scripts without cells are examples of other pages.
    paths = [path for path in EXAMPLES.glob("*.py") if "\n# %%" in path.read_text()]
    scripts = sorted(path.stem for path in paths)
    assert tutorials.names() == scripts
    index = (tutorials.PAGES / "index.md").read_text()
    assert sorted(re.findall(r"^\| \[[^]]*\]\((\w+)\.md\)", index, re.M)) == scripts


@pytest.mark.parametrize("name", tutorials.names())
def test_the_page_shows_the_code_of_the_script_and_outputs(name: str) -> None:
    assert not tutorials.differences(name)
    assert outputs_of(name) and all(outputs_of(name))


@pytest.mark.parametrize("name", tutorials.NOTEBOOK_NAMES)
def test_the_notebook_has_the_cells_of_the_page(name: str) -> None:
    book = json.loads((tutorials.NOTEBOOKS / f"{name}.ipynb").read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    assert cells == tutorials.notebook(name), "run `make notebooks`"


@pytest.mark.slow
def test_a_patched_model_trains_as_stock_in_the_trainer(run: Run) -> None:
    output = run(*script("trainer"))
    pairs = re.findall(r"loss: stock ([\d.]+), patched ([\d.]+)", output)
    assert len(pairs) == 3
    for stock, patched in pairs:
        assert float(patched) == pytest.approx(float(stock), rel=2e-3)
    (difference,) = numbers(r"difference of the losses: -?([\d.e-]+)", output)
    assert difference < 5e-3
    assert len(numbers(r"a patched step is ([\d.]+) times as fast", output)) == 1


@pytest.mark.slow
def test_a_model_of_own_classes_trains_as_stock(run: Run) -> None:
    output = run(*script("own_model"))
    assert "Model: 38 of 39 modules replaced at level O3" in output
    for value in ("of a gradient", "of the logits"):
        stock, patched, called = numbers(rf"{value} ([\d.]+)", output)
        assert max(patched, called) < 2 * stock + 0.01
    losses = re.findall(r"stock ([\d.]+), patched ([\d.]+), ops called ([\d.]+)", output)
    assert len(losses) == 3
    for stock_loss, *others in losses:
        assert [float(loss) for loss in others] == pytest.approx([float(stock_loss)] * 2, rel=2e-3)
    (difference,) = numbers(r"difference of the losses: ([\d.e-]+)", output)
    assert difference < 5e-3
    assert len(numbers(r"([\d.]+) times as fast as stock", output)) == 2


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The classes of the page as a module, one small layer, with dropout in the attention."""
    code, mask = tutorials.cells_of("own_model")[0], "attn_mask=mask"
    assert mask in code and "use_reentrant=False" in code
    code = code.replace(mask, f"{mask}, dropout_p=DROPOUT if self.training else 0.0")
    code = code.replace("use_reentrant=False", "use_reentrant=REENTRANT")
    (tmp_path / "own_classes.py").write_text(code.replace("fusedops.tune_host()\n", ""))
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module("own_classes")
    module.WIDTH, module.LAYERS, module.LENGTH = 64, 1, 24
    module.DROPOUT, module.REENTRANT = 0.0, False
    yield module
    del sys.modules["own_classes"]


def gradients(model: Any, call: Any = None) -> list[torch.Tensor]:
    """Return the gradients of a fixed batch with padding, by a call of the model."""
    ids = torch.arange(48).view(2, 24) % 11
    mask = torch.ones(24, 24, dtype=torch.bool).tril() & (torch.arange(24) < 20)
    torch.manual_seed(1)
    logits = (model if call is None else call)(ids, mask)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.slow
def test_a_model_of_own_classes_is_compiled_by_inductor(own_model: Any) -> None:
    stock = own_model.Model()
    patched, passes = copy.deepcopy(stock), fusedops.compile_passes()
    assert fusedops.patch(patched, level="O3").counts.keys() >= {"attention", "linear_glu"}
    exact = copy.deepcopy(stock).double()
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        want = gradients(exact)
    for options in ({}, {"options": passes}):
        torch._dynamo.reset()
        found = gradients(patched, torch.compile(patched, **options))
        assert_all_close(found, want, gradients(stock), depth=48)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_block_of_own_classes_repeats_its_dropout(
    own_model: Any, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_model.DROPOUT, own_model.REENTRANT = 0.3, reentrant
    model = own_model.Model()
    fusedops.patch(model, level="O3")
    fusedops.reset_counters()
    recomputed = gradients(model)
    assert fusedops.counters()["attention", "cpp"] == 2
    monkeypatch.setattr(own_model, "checkpoint", lambda block, *args, **_: block(*args))
    assert_same_bits(recomputed, gradients(model))
    own_model.DROPOUT = 0.0
    assert not torch.equal(recomputed[0], gradients(model)[0])


@pytest.mark.slow
def test_a_patched_model_trains_to_the_same_losses(run: Run, tmp_path: Path) -> None:
    output = run(*script("speed_up"))
    pairs = re.findall(r"loss: stock ([\d.]+), patched ([\d.]+)", output)
    assert len(pairs) == 4
    for stock, patched in pairs:
        assert float(patched) == pytest.approx(float(stock), abs=2e-4)
    assert len(numbers(r"a patched step is ([\d.]+) times as fast", output)) == 1
    assert "both generate the same tokens: True" in output
    assert "modeling_llama.LlamaMLP'>" in output, "unpatched"
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.slow
def test_pretraining_learns_resumes_and_generates(run: Run, tmp_path: Path) -> None:
    output = run(*script("pretrain"))
    losses = numbers(r"step \d+  loss ([\d.]+)", output)
    assert len(losses) == 8 and losses[-1] < 2.2 < losses[0]
    assert numbers(r"validation loss ([\d.]+)", output)[0] < 2.2
    assert re.findall(r"begins after step (\d+)", output) == ["0", "300"]
    assert len(output.split("    def __init__(self")[-1]) > 50
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_all_layouts_have_the_losses_of_one_process(run: Run) -> None:
    page = (tutorials.PAGES / "parallel.md").read_text()
    commands = re.findall(
        r"^torchrun --standalone --nproc-per-node (\d) parallel.py (.*)$", page, re.M
    )
    assert len(commands) == 5
    pattern = r"step \d  loss ([\d.]+)"
    one = run(*script("parallel"))
    expected = numbers(pattern, one)
    assert len(expected) == 5 and expected[-1] < expected[0]
    for processes, layout in commands:
        output = run(
            *TORCHRUN, "--nproc-per-node", processes, script("parallel")[1], *layout.split()
        )
        assert numbers(pattern, output) == pytest.approx(expected, abs=2e-4), layout
        stored, total = re.findall(r"stores ([\d,]+) of ([\d,]+) weights", output)[0]
        assert (stored == total) == (layout == "dp=2")


@pytest.mark.slow
def test_the_plan_is_for_64_devices_and_fits(run: Run) -> None:
    output = run(*script("plan"))
    rows = re.findall(
        r"^ *(\d+) +(\d+) +(\d+) +(\d+) +\d  .*? ([\d.]+) +([\d.]+) +(-?[\d.]+)$", output, re.M
    )
    assert len(rows) == 7
    devices = [int(dp) * int(tp) * int(pp) * int(cp) for dp, tp, pp, cp, *_ in rows]
    assert devices == [64] * 5 + [32, 64]
    seconds = [float(row[4]) for row in rows]
    assert seconds[:5] == sorted(seconds[:5])
    assert all(float(row[6]) >= 0 for row in rows)
    assert seconds[6] >= seconds[0], "a restricted search finds nothing faster"
    assert 1 < numbers(r"64 devices are ([\d.]+) times", output)[0] < 2.2
    # The planner's numbers are the same on every machine.
    assert all(shown in output for shown in outputs_of("plan")), "run `make tutorials NAMES=plan`"


@pytest.mark.slow
def test_each_measure_makes_long_sequences_smaller(run: Run) -> None:
    output = run(*script("long_sequences"))
    peaks = dict(re.findall(r"^([a-z., ]+?) +(\d+) MiB$", output, re.M))
    sizes = {name: int(peak) for name, peak in peaks.items()}
    order = ["stock", "patched", "patched, chunked loss", "... layers recomputed"]
    assert [sizes[name] for name in order] == sorted((sizes[name] for name in order), reverse=True)
    assert sizes["... layers recomputed"] <= sizes["... but attention saved"]
    assert sizes["... but attention saved"] < sizes["patched, chunked loss"]
    assert sizes["... layers offloaded instead"] < sizes["patched, chunked loss"]
    complete, chunks = re.findall(r"complete logits ([\d.]+), chunks ([\d.]+)", output)[0]
    assert float(chunks) == pytest.approx(float(complete), abs=2e-5)
    assert "the gradients have the same bits: True" in output
    assert re.search(r"^chosen: Policy\(recompute", output, re.M)
    losses = numbers(r"step \d  loss ([\d.]+)", output)
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.slow
def test_the_op_has_two_kernels_and_is_sharded(run: Run) -> None:
    pytest.importorskip("triton")
    output = run(*script("write_an_op"))
    assert "equal: True" in output and "gradcheck: True" in output
    assert "refused: scale_add: other must be of shape [3, 5]" in output
    assert "before: torch" in output and "after: cpp" in output
    errors = dict(re.findall(r"(torch|cpp|triton): largest error ([\d.e+-]+)", output))
    assert errors.keys() == {"torch", "cpp", "triton"}
    assert all(float(error) < 1e-6 for error in errors.values())
    assert "placements of the result: (Shard(dim=0),)" in output


@pytest.mark.slow
@pytest.mark.distributed
def test_the_slow_rank_is_named(run: Run) -> None:
    torchrun = [*TORCHRUN, "--nproc-per-node", "2", script("slow_rank")[1]]
    output = run(*torchrun, "1")
    assert re.search(r"rank 1 is [\d.]+x as slow as its peers \(forward\)", output)
    run(*torchrun)
    cli = [sys.executable, "-m", "fusedops", "profile", "slow"]
    assert "rank 1 is" in run(*cli)
    assert re.search(r"step .* [\d.]+x", run(*cli, "--compare", "healthy"))
