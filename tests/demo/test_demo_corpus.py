"""The demo's text: split by content, tokens without loss, cache, and what is said without it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
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


def documents(corpus: Corpus, side: str) -> list[str]:
    """Return the texts of a stream, in its order."""
    end = corpus.tokenizer.token_to_id(END_OF_TEXT)
    tokens = getattr(corpus, side)
    assert tokens[-1] == end, "the last file has no end"
    ends = (tokens == end).nonzero().flatten() + 1
    return [corpus.tokenizer.decode(part[:-1].tolist()) for part in tokens.tensor_split(ends)[:-1]]


def test_each_file_is_on_one_side_by_its_content(source: Source) -> None:
    corpus, files = load_corpus(source), read_files(source.directory)
    train, validation = documents(corpus, "train"), documents(corpus, "validation")
    assert sorted(train + validation) == sorted(file.text for file in files)
    assert sorted(validation) == sorted(file.text for file in files if is_validation(file))
    assert len(train) > len(validation) > 0 and not set(train) & set(validation)
    assert "name = '\ufffd'\n" in train + validation  # a byte that is no UTF-8
    part = load_corpus(replace(source, train_bytes=2000))
    sizes = [len(text) for text in documents(part, "train")]
    assert sum(sizes) >= 2000 > sum(sizes[:-1])
    assert sorted(documents(part, "validation")) == sorted(validation)


def test_the_cache_serves_the_same_files_alone(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_corpus(source)
    with monkeypatch.context() as context:
        context.setattr(corpus_module, "train_tokenizer", None)
        second = load_corpus(source)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    assert second.tokenizer.to_str() == first.tokenizer.to_str()
    (cached,) = source.cache.glob("corpus-*.pt")
    cached.write_bytes(cached.read_bytes()[:100])
    assert torch.equal(load_corpus(source).train, first.train), "a damaged cache is built anew"
    (source.directory / "greek.py").write_text("omega = 1\n")
    for corpus, is_new in ((first, False), (load_corpus(source), True)):
        texts = documents(corpus, "train") + documents(corpus, "validation")
        assert ("omega = 1\n" in texts) == is_new


def test_batches_are_windows_fixed_by_seed_and_step(corpus: Corpus) -> None:
    shape = {"batch_size": 4, "seq_len": 16}
    batch = corpus.batch(3, seed=0, **shape)
    assert batch.shape == (4, 16) and batch.dtype == torch.int64
    windows = corpus.train.unfold(0, 16, 1).long()
    assert all((windows == row).all(1).any() for row in batch)
    assert torch.equal(batch, corpus.batch(3, seed=0, **shape))
    assert not torch.equal(batch, corpus.batch(4, seed=0, **shape))
    assert not torch.equal(batch, corpus.batch(3, seed=1, **shape))
    rows = torch.cat(corpus.validation_batches(batch_size=2, seq_len=16, max_batches=4))
    windows = corpus.validation.unfold(0, 16, 16).long()
    places = [int((windows == row).all(1).nonzero()[0]) for row in rows]
    assert len(places) == 8 and places == sorted(set(places)), "validation batches overlap"


def test_no_corpus_is_said(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (default_directory() / "core" / "basic.py").is_file()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (source.cache / "__init__.py").write_text("\n")
    for changes, said in (
        ({"directory": None}, r"sympy.*not installed.*--corpus"),
        ({"directory": source.directory / "nowhere"}, "nowhere does not exist"),
        ({"directory": source.cache}, "holds no Python files with text"),
        ({"min_tokens": 10**6}, r"too small: \d+ train tokens, and one sequence takes"),
    ):
        with pytest.raises(UserError, match=said):
            load_corpus(replace(source, **changes))
