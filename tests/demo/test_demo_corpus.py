"""The demo's text: split by content, tokens without loss, cache, and what is said without it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from demo_corpus import make_corpus_directory
from gpt2_demo import corpus as corpus_module
from gpt2_demo.corpus import (
    END_OF_TEXT,
    Corpus,
    Source,
    default_directory,
    is_validation,
    load_corpus,
    read_files,
)

from fusedops.terminal.files import UserError


@pytest.fixture
def source(corpus_directory: Path, tmp_path: Path) -> Source:
    cache = tmp_path / "cache"
    cache.mkdir()
    return Source(corpus_directory, cache, vocab_size=400, train_bytes=10**6, min_tokens=8, seed=0)


def documents(corpus: Corpus, side: str) -> list[str]:
    end = corpus.tokenizer.token_to_id(END_OF_TEXT)
    stream = getattr(corpus, side).tolist()
    texts, current = [], []
    for token in stream:
        if token == end:
            texts.append(corpus.tokenizer.decode(current))
            current = []
        else:
            current.append(token)
    assert not current, "the last file has no end"
    return texts


def test_each_file_is_whole_on_exactly_one_side(source: Source) -> None:
    corpus = load_corpus(source)
    files = read_files(source.directory)
    train, validation = documents(corpus, "train"), documents(corpus, "validation")
    assert sorted(train + validation) == sorted(file.text for file in files)
    assert sorted(validation) == sorted(file.text for file in files if is_validation(file))
    assert validation and len(train) > len(validation)


def test_equal_files_are_on_one_side_whatever_their_names(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "z.py"):
        (tmp_path / name).write_text("x = 1\n")
    assert len({is_validation(file) for file in read_files(tmp_path)}) == 1


def test_second_load_takes_the_cached_tokens(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_corpus(source)
    monkeypatch.setattr(corpus_module, "train_tokenizer", None)
    second = load_corpus(source)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    assert second.tokenizer.to_str() == first.tokenizer.to_str()


def test_a_changed_file_is_not_served_from_the_cache(source: Source) -> None:
    before = load_corpus(source)
    (source.directory / "greek.py").write_text("omega = 1\n")
    after = load_corpus(source)
    texts = documents(after, "train") + documents(after, "validation")
    assert "omega = 1\n" in texts
    assert "omega = 1\n" not in documents(before, "train") + documents(before, "validation")


def test_a_damaged_cache_is_built_anew(source: Source) -> None:
    first = load_corpus(source)
    (cached,) = source.cache.glob("corpus-*.pt")
    cached.write_bytes(cached.read_bytes()[:100])
    assert torch.equal(load_corpus(source).train, first.train)


def test_train_bytes_limits_the_training_side_only(source: Source) -> None:
    whole = load_corpus(source)
    part = load_corpus(replace(source, train_bytes=2000))
    sizes = [len(text) for text in documents(part, "train")]
    assert sum(sizes) >= 2000 > sum(sizes[:-1])
    assert sorted(documents(part, "validation")) == sorted(documents(whole, "validation"))


def test_batches_are_windows_of_the_stream_fixed_by_seed_and_step(corpus: Corpus) -> None:
    shape = {"batch_size": 4, "seq_len": 16}
    batch = corpus.batch(3, seed=0, **shape)
    assert batch.shape == (4, 16) and batch.dtype == torch.int64
    windows = corpus.train.unfold(0, 16, 1).long()
    assert all((windows == row).all(1).any() for row in batch)
    assert torch.equal(batch, corpus.batch(3, seed=0, **shape))
    assert not torch.equal(batch, corpus.batch(4, seed=0, **shape))
    assert not torch.equal(batch, corpus.batch(3, seed=1, **shape))


def test_validation_batches_do_not_overlap(corpus: Corpus) -> None:
    batches = corpus.validation_batches(batch_size=2, seq_len=16, max_batches=4)
    rows = torch.cat(batches)
    assert len(rows) == 8
    windows = corpus.validation.unfold(0, 16, 16).long()
    places = [int((windows == row).all(1).nonzero()[0]) for row in rows]
    assert places == sorted(set(places))


def test_default_directory_is_sympy() -> None:
    assert (default_directory() / "core" / "basic.py").is_file()


def test_sympy_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sympy.*not installed.*--corpus"):
        load_corpus(replace(source, directory=None))


def test_missing_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_files(tmp_path / "nowhere")


def test_directory_without_python_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("\n")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(UserError, match="holds no Python files with text"):
        read_files(tmp_path)


def test_too_little_text_is_said(source: Source) -> None:
    with pytest.raises(UserError, match=r"too small: \d+ train tokens, and one sequence takes"):
        load_corpus(replace(source, min_tokens=10**6))


def test_bytes_that_are_no_utf8_do_not_stop_it(tmp_path: Path) -> None:
    directory = make_corpus_directory(tmp_path / "source")
    (directory / "latin.py").write_bytes(b"name = '\xe9'\n")
    assert "name = '\ufffd'\n" in [file.text for file in read_files(directory)]
