"""The demo lives outside of the package: its folder goes onto the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "models"))

try:
    from demo_corpus import make_corpus_directory
    from gpt2_demo.corpus import Corpus, Source, load_corpus
    from gpt2_demo.training import Settings
except ModuleNotFoundError as error:
    # The demo is for people who have transformers: without it there is nothing to test.
    if (error.name or "fusedops").startswith("fusedops"):
        raise
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def corpus_directory(tmp_path: Path) -> Path:
    return make_corpus_directory(tmp_path / "source")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("demo")
    (root / "cache").mkdir()
    source = make_corpus_directory(root / "source")
    return load_corpus(
        Source(source, root / "cache", vocab_size=400, train_bytes=10**6, min_tokens=16, seed=0)
    )


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings(
        layers=2,
        hidden=64,
        heads=2,
        vocab_size=400,
        seq_len=16,
        batch_size=2,
        steps=20,
        seed=0,
        device="cpu",
    )
