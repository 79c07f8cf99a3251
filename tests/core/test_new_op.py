"""The tools that start a new op and check it: docs/adding_an_op.md."""

from __future__ import annotations

import shutil
from pathlib import Path

import check_op
import fresh_process
import new_op
import pytest

ROOT = Path(__file__).resolve().parents[2]
CALL = """
import torch, fusedops
from fusedops.specs import all_specs

x, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6)
with fusedops.use_backend("torch"):
    output = fusedops.scale_add(x, bias)
    torch.testing.assert_close(output, fusedops.bias_gelu(x, bias))
    output.sum().backward()
assert torch.ops.fusedops.scale_add.default._schema.name == "fusedops::scale_add"
assert all_specs()["scale_add"].op is fusedops.scale_add
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, without libraries."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("fusedops", "csrc", "tests/ops", "tests/hot_samples", "tools/kernel_cases"):
        ignore = shutil.ignore_patterns("*.so", "*.json", "__pycache__")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignore)
    return root


def test_a_new_op_is_a_copy_that_works(tree: Path) -> None:
    written = new_op.write(tree, "scale_add", "bias_gelu")
    names = {str(path.relative_to(tree)) for path in written}
    kernels = {f"csrc/cpu/elementwise/scale_add{end}" for end in (".h", ".cpp", ".isa.cpp")}
    kernels.add("csrc/common/scale_add.h")
    parts = {f"fusedops/{folder}/scale_add.py" for folder in ("ops", "specs", "kernels")}
    tables = {"tools/kernel_cases/elementwise.py", "tests/hot_samples/elementwise.py"}
    assert kernels | parts | tables <= names
    for path in written[: len(kernels | parts)]:
        text = path.read_text()
        assert "bias_gelu" not in text and "BiasGelu" not in text, path
    assert '#include "gelu_vec.h"' in (tree / "csrc/cpu/elementwise/scale_add.isa.cpp").read_text()
    fresh_process.run(CALL, folder=tree, check=True, PYTHONPATH=str(tree))


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("ScaleAdd", "gelu", "write snake case"),
        ("scale_it", "nothing", "there is no such op; known: adamw, add_layer_norm"),
        ("swiglu", "gelu", "fusedops/ops/swiglu.py exists"),
    ],
)
def test_wrong_names_write_nothing(tree: Path, name: str, like: str, message: str) -> None:
    before = sorted(tree.rglob("*.py"))
    with pytest.raises(ValueError, match=message):
        new_op.write(tree, name, like)
    assert sorted(tree.rglob("*.py")) == before


def test_a_check_that_selects_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    command = ("-m", "pytest", "-q", "--noconftest", str(tmp_path), "-k", "no_test_of_this_name")
    assert "no test was selected" in check_op.Check("nothing", command).run()
    assert check_op.Check("fine", ("-c", "")).run() == ""
    assert check_op.Check("fails", ("-c", "raise SystemExit(3)")).run() == "exit code 3"
