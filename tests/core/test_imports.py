"""What waits for the import of another package runs after it: once, and after success only."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fresh_process
import pytest

from fusedops._core import imports

FAILS_ONCE = """
import sys
sys.tries = getattr(sys, "tries", 0) + 1
if sys.tries == 1:
    raise OSError("once")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Give a function that writes a module in a package and returns its name."""

    def write(code: str) -> str:
        folder = tmp_path / "waited_for"
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "module.py").write_text(code)
        return "waited_for.module"

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield write
    for name in ("waited_for", "waited_for.module"):
        sys.modules.pop(name, None)


def test_a_lookup_is_no_import(package: Callable[[str], str]) -> None:
    name, calls = package(""), list[str]()
    wait = functools.partial(calls.append, "call")
    imports.after(name, wait)
    imports.after(name, wait)  # twice the same, which is called once
    for _ in range(2):
        assert importlib.util.find_spec(name) is not None
    assert calls == []
    importlib.import_module(name)
    assert calls == ["call"]
    importlib.reload(sys.modules[name])
    assert calls == ["call"]
    imports.after(name, lambda: calls.append("at once"))
    assert calls == ["call", "at once"]


def test_an_import_that_fails_may_be_repeated(
    package: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, calls = package(FAILS_ONCE), list[str]()
    monkeypatch.setattr(sys, "tries", 0, raising=False)
    imports.after(name, lambda: calls.append("call"))
    with pytest.raises(OSError, match="once"):
        importlib.import_module(name)
    assert calls == []
    importlib.import_module(name)
    assert calls == ["call"]


@pytest.mark.parametrize(
    "before",
    [
        "importlib.util.find_spec('torch.distributed.tensor')",
        "torch._logging.set_logs(modules={'torch.distributed.tensor': logging.DEBUG})",
    ],
)
def test_rules_for_sharded_tensors_survive_a_lookup(before: str) -> None:
    code = f"""
        import importlib.util, logging, torch, fusedops
        from fusedops._core import sharding
        assert len(sharding._WAITING) > 40
        {before}
        import torch.distributed.tensor
        print(len(sharding._WAITING))
    """
    assert fresh_process.run(code, check=True).stdout.strip() == "0"
