"""Sequences: each once an epoch, in an order that neither ranks nor interruptions change.

Rank 0 prepares what all read: the others wait for it without a collective, which would end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from fusedops.generation.text import Text
from fusedops.launch.processes import Ranks
from fusedops.launch.run_folder import lock_run_folder
from fusedops.train import InputError, corpus
from fusedops.train.config import DataConfig
from fusedops.train.data import Sequences, permuted


def opened(data: DataConfig, cache: Path) -> Any:
    corpus.prepare(data, cache)
    return corpus.open_corpus(data, cache)


@pytest.mark.parametrize("count", [1, 2, 3, 64, 1000])
def test_each_epoch_is_another_permutation(count: int) -> None:
    indices = torch.arange(count)
    orders = [permuted(indices, torch.full_like(indices, epoch), count, 7) for epoch in (0, 1)]
    for order in orders:
        assert order.sort().values.tolist() == list(range(count))
    if count == 1000:
        assert (orders[0] == orders[1]).sum() < 10 and (orders[0] == indices).sum() < 10
        assert not torch.equal(orders[0], permuted(indices, torch.zeros_like(indices), count, 8))


def test_ranks_and_microbatches_share_the_rows_of_a_step() -> None:
    sequences = Sequences(torch.arange(1000), 8, seed=3)
    (whole,) = sequences.microbatches(24, 12)
    assert torch.equal(whole.labels, whole.tokens + 1)
    parts = [
        list(sequences.microbatches(24, 12, microbatches=2, share=share, shares=3))
        for share in range(3)
    ]
    rows = [parts[share][number].tokens for number in range(2) for share in range(3)]
    assert torch.equal(torch.cat(rows), whole.tokens)


def test_text_becomes_tokens_once_and_names_do_not_matter(tmp_path: Path) -> None:
    for folder, names in (("a", "xy"), ("b", "yx")):
        (tmp_path / folder).mkdir()
        for name, text in zip(names, ("Stra\u00dfe", "tea"), strict=True):
            (tmp_path / folder / f"{name}.txt").write_text(text, encoding="utf-8")
    streams = []
    for folder in "ab":
        data = DataConfig(train=(f"{tmp_path}/{folder}/*.txt",), seq_len=2, validation_share=0.25)
        found = opened(data, tmp_path / "cache")
        streams.append(torch.cat([found.train, found.validation]).tolist())
        assert len(found.validation) == 3 and found.vocab_size == 257
    one, two = [*"Stra\u00dfe".encode(), 256], [*b"tea", 256]
    assert streams[0] == streams[1] and streams[0] in (one + two, two + one)
    made = sorted((tmp_path / "cache").iterdir())
    before = [each.stat().st_mtime_ns for each in made]
    corpus.prepare(data, tmp_path / "cache")
    assert [each.stat().st_mtime_ns for each in made] == before


@pytest.mark.parametrize("name", ["a.txt", "a.bin"])
def test_the_identity_of_a_corpus_is_its_contents(tmp_path: Path, name: str) -> None:
    path, cache = tmp_path / name, tmp_path / "cache"
    data = DataConfig(train=(str(path),), seq_len=2)
    path.write_text("tea and tea " * 9)
    first = opened(data, cache).identity
    os.utime(path, (1, 1))
    assert opened(data, cache).identity == first
    path.write_text("tea and tee " * 9)
    os.utime(path, (1, 1))
    assert opened(data, tmp_path / "other").identity != first


def test_text_that_is_not_utf8_is_skipped_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("tea and tea")
    (tmp_path / "b.txt").write_bytes(b"t\xffe")
    streams = {}
    for errors in ("skip", "replace"):
        given = {"seq_len": 2, "validation_share": 0.0, "errors": errors}
        data = DataConfig(train=(f"{tmp_path}/*.txt",), **given)
        tokens = opened(data, tmp_path / "cache").train
        streams[errors] = bytes(token for token in tokens.tolist() if token < 256)
    assert streams["skip"] == b"tea and tea"
    replaced = "t\ufffde".encode()
    assert replaced in streams["replace"] and len(streams["replace"]) == 11 + len(replaced)


@pytest.mark.parametrize("entry", [".", "**/*", "{folder}", "{folder}/**/*"])
def test_what_runs_wrote_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    Path("books/a.txt").write_text("one and two")
    entry = entry.format(folder=tmp_path)
    data = DataConfig(train=(entry,), seq_len=2)
    for name in ("runs/a", "runs/b"):  # the second meets what the first wrote, and its own lock
        with lock_run_folder(Path(name)):
            for cache in (Path(name) / "cache", Path("tokens")):
                found = opened(data, cache)
                assert bytes(torch.cat([found.train, found.validation])[:-1]) == b"one and two"
            Path(name, "metrics.jsonl").write_text("{}")
    # Text in a run's folder is read where it is asked for, but not the folder itself.
    Path("runs/a/own.txt").write_text("three")
    for entry in ("runs/a/*.txt", f"{tmp_path}/runs/a/own.txt"):
        assert [path.name for path in corpus._expand([entry])] == ["own.txt"]
    with pytest.raises(InputError, match="must not be the folder of a run"):
        corpus.prepare(DataConfig(train=("runs/a",), seq_len=2), Path("tokens"))


def test_tokens_that_were_removed_from_the_cache_are_made_anew(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("tea and tea")
    data, cache = DataConfig(train=(f"{tmp_path}/a.txt",), seq_len=2), tmp_path / "cache"
    corpus.prepare(data, cache)
    (tokens,) = cache.glob("*.bin")
    tokens.unlink()
    with pytest.raises(InputError, match="are missing or incomplete"):
        corpus.open_corpus(data, cache)
    corpus.prepare(data, cache)
    assert corpus.open_corpus(data, cache).identity and tokens.exists()


@pytest.mark.parametrize("stored", ["truncation", "padding", "dropout", "gaps"])
def test_all_of_a_text_is_read_whatever_a_tokenizer_stores(tmp_path: Path, stored: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    gap = 70_000 if stored == "gaps" else 0
    vocabulary = {"[PAD]": 0, "<end>": 1, "a": 2 + gap, "b": 3 + gap, "ab": 4 + gap}
    dropout = 0.5 if stored == "dropout" else None
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")], dropout=dropout))
    if stored == "truncation":
        made.enable_truncation(16)
    if stored == "padding":
        made.enable_padding(length=300)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    (tmp_path / "a.txt").write_text("ab" * 100)
    options = {"tokenizer": str(path), "end_of_text": "<end>", "seq_len": 4}
    data = DataConfig(train=(f"{tmp_path}/a.txt",), **options)
    found = opened(data, tmp_path / "cache")
    tokens = torch.cat([found.train, found.validation]).tolist()
    assert tokens == [4 + gap] * 100 + [1]
    assert found.vocab_size == 5 + gap
    assert Text.of(str(path)).encode("ab" * 100) == tokens[:-1]


def test_files_of_tokens_are_mapped_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    tokens = torch.arange(40)
    path.write_bytes(tokens.int().numpy().tobytes())
    data = DataConfig(train=(str(path),), token_dtype="int32", seq_len=8, validation_share=0.5)
    found = opened(data, tmp_path / "cache")
    assert found.train.tolist() == list(range(20)) and found.validation[0] == 20
    corpus.check_ids(found, 40)
    with pytest.raises(InputError, match="validation tokens must be in .0, 30.*number 10 is 30"):
        corpus.check_ids(found, 30)
    corpus.check_ids(found, 30, 0, 2)  # the other half of each is another rank's
    tokens[7] += 2**32  # whose lower half is a word
    path.write_bytes(tokens.numpy().tobytes())
    found = corpus.open_corpus(replace(data, token_dtype="int64"), tmp_path / "cache")
    with pytest.raises(InputError, match=f"number 7 is {2**32 + 7}"):
        corpus.check_ids(found, 64)


BAD = {
    "missing": ({}, "the corpus .*/missing does not exist"),
    "empty": ({"a.txt": b"", "b.txt": b" \n"}, "the corpus is empty: no text in 2 files"),
    "binary": ({"a.txt": b"tea \xff"}, "a.txt is not UTF-8: byte 4"),
    "short": ({"a.txt": b"tea"}, "too short: 4 tokens to train on, .* takes 9"),
    "odd": ({"a.bin": b"123"}, "tokens of 2 bytes each .uint16., got 3 bytes"),
    "mixed": ({"a.bin": b"12", "a.txt": b"tea"}, "cannot be mixed"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_a_corpus_that_cannot_be_trained_on_is_refused(tmp_path: Path, case: str) -> None:
    files, message = BAD[case]
    folder = tmp_path / case
    if files:
        folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    data = DataConfig(train=(str(folder),), seq_len=8, validation_share=0.0)
    with pytest.raises(InputError, match=message):
        opened(data, tmp_path / "cache")


def test_a_validation_set_without_a_sequence_is_refused(tmp_path: Path) -> None:
    for name, text in (("a", "tea " * 9), ("b", "tea")):
        (tmp_path / f"{name}.txt").write_text(text)
    data = DataConfig(train=(f"{tmp_path}/a.txt",), validation=(f"{tmp_path}/b.txt",), seq_len=8)
    corpus.prepare(data, tmp_path / "cache")
    with pytest.raises(InputError, match="data.validation is too short: 4 tokens, .* takes 9"):
        corpus.open_corpus(data, tmp_path / "cache")


def test_a_file_that_vanishes_leaves_no_half_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("tea")
    plain, reads = corpus._read, []

    def read(path: Path, errors: str) -> str | None:
        reads.append(path)
        return plain(path if len(reads) == 1 else path / "nowhere", errors)

    monkeypatch.setattr(corpus, "_read", read)
    with pytest.raises(InputError, match="cannot read"):
        corpus.prepare(DataConfig(train=(f"{tmp_path}/a.txt",)), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("fails", [False, True])
def test_the_others_wait_until_rank_0_has_left_the_block(fails: bool) -> None:
    store = dist.HashStore()
    ranks = [Ranks(rank, 3, torch.device("cpu"), store) for rank in range(3)]
    left: list[int] = []
    may_end = threading.Event()

    def prepare(of: Ranks) -> None:
        for _ in range(2):
            with contextlib.suppress(ValueError), of.first() as is_first:
                assert is_first == (of.rank == 0)
                if is_first:
                    may_end.wait()
                    left.append(0)
                    if fails:
                        raise ValueError("no such text")
            if of.rank:
                left.append(of.rank)

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(prepare, of) for of in ranks]
        early = wait(done[1:], timeout=0.3).done or left[:]
        may_end.set()
    assert not early
    assert left[0] == 0 and sorted(left) == [0, 0, 1, 1, 2, 2]
    assert [each.result() for each in done] == [None] * 3
