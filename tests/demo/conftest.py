"""The demo lives outside of the package: its folder goes onto the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "models"))

try:
    from gpt2_demo.corpus import Corpus, Source, load_corpus
    from gpt2_demo.training import Settings
except ModuleNotFoundError as error:
    # The demo is for people who have transformers: without it there is nothing to test.
    if (error.name or "fusedops").startswith("fusedops"):
        raise
    collect_ignore_glob = ["test_*.py"]


def make_source(root: Path) -> Source:
    """Write small modules, some of them equal, some not of ASCII or of UTF-8, and an empty one."""
    directory, cache = root / "source", root / "cache"
    for folder in (directory / "inner", cache):
        folder.mkdir(parents=True)
    for index in range(150):
        lines = [f"def function_{index}(a, b={index}):", f'    """Return {index}."""']
        lines += [f"    a = a + {index * step} * b" for step in range(6)]
        folder = directory / "inner" if index % 2 else directory
        (folder / f"function_{index}.py").write_text("\n".join([*lines, "    return a", ""]))
        (folder / f"equal_{index}.py").write_text("x = 1\n")
    (directory / "greek.py").write_text("alpha = 'αβγ → ∞'\n", encoding="utf-8")
    (directory / "latin.py").write_bytes(b"name = '\xe9'\n")
    (directory / "__init__.py").write_text("")
    (directory / "notes.txt").write_text("no Python")
    return Source(directory, cache, vocab_size=400, train_bytes=10**6, min_tokens=16, seed=0)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return make_source(tmp_path)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_corpus(make_source(tmp_path_factory.mktemp("demo")))


@pytest.fixture(scope="session")
def settings() -> Settings:
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "vocab_size": 400, "seq_len": 16}
    return Settings(**sizes, batch_size=2, steps=20, seed=0, device="cpu")
