"""What other libraries' sockets need is imported by them alone, and named where it is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from fusedops._core import imports

# Module of fusedops.integrations -> (what it imports, what pip calls it).
SOCKETS = {
    "accelerate": (("accelerate",), "accelerate"),
    "deepspeed": (("deepspeed",), "deepspeed"),
    "kernels": (("transformers",), "transformers"),
    "lightning": (("lightning", "pytorch_lightning"), "lightning"),
    "megatron": (("megatron",), "megatron-core"),
    "trainer": (("transformers",), "transformers"),
}


@pytest.mark.parametrize("socket", SOCKETS)
def test_a_missing_library_is_named(socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed, package = SOCKETS[socket]
    for name in list(sys.modules):
        if name.split(".")[0] in needed or name.startswith(f"fusedops.integrations.{socket}"):
            monkeypatch.delitem(sys.modules, name)
    for name in needed:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"integrations.{socket} needs .*pip install {package}$"):
        importlib.import_module(f"fusedops.integrations.{socket}")


def test_an_error_inside_of_a_library_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numbers", None)
    monkeypatch.delitem(sys.modules, "fractions", raising=False)  # imports numbers
    with pytest.raises(ModuleNotFoundError, match="numbers"):
        imports.needed("fractions", "fractions", "a test")
    with pytest.raises(ImportError, match=r"^a test needs fractions\.no, .*pip install a-package$"):
        monkeypatch.undo()
        imports.needed("fractions.no", "a-package", "a test")


_PROGRAM = """
import sys, fusedops, fusedops.integrations, torch
def patches():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)).bfloat16()
    assert fusedops.patch(model).num_replaced == 2
    model(torch.ones(16, 8).bfloat16()); assert fusedops.counters()
    fusedops.unpatch(model); assert type(model[0]) is torch.nn.LayerNorm
patches()
print([name for name in sys.argv[1:] if name in sys.modules])
sys.modules["transformers"] = None
patches()
"""


def test_importing_and_patching_torchs_modules_imports_no_library() -> None:
    libraries = sorted({name for needed, _ in SOCKETS.values() for name in needed})
    command = [sys.executable, "-c", _PROGRAM, *libraries]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"
