"""Text and files of tokens as one memory-mapped stream of token ids.

Text becomes a file of tokens once, in the run's cache: files in the order of their contents'
SHA-256, so that names do not matter and the end of the stream is a random sample. An end token
follows each of them. Later runs map the file, as they map a token file that the user gives.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusedops.launch.config_table import InputError
from fusedops.launch.run_folder import is_run_folder
from fusedops.train.config import DataConfig

BYTES = "bytes"
TOKENS = ".bin"
_VERSION = 5
_SAMPLES, _SAMPLE = 64, 1 << 16
_log = logging.getLogger(__name__)
_CACHED = re.compile(r"tokens-[0-9a-f]{16}\.(bin|json|\d+\.part)")
_FILES_AT_ONCE = 64
_SCAN = 1 << 24


@dataclass(frozen=True)
class Tokenizer:
    """What turns text into tokens."""

    size: int  # of the vocabulary: ids are less
    end: int  # token that follows each file
    encode: Callable[[list[str]], list[torch.Tensor]]  # texts to their ids
    identity: str  # what a cache of tokens depends on


@dataclass(frozen=True)
class Domains:
    """Which domain each token of a stream belongs to."""

    ends: torch.Tensor  # int64, ascending: where the files of a stream end
    of_files: torch.Tensor  # int64, the domain of each
    first: int = 0  # place of the first token in that stream

    def __call__(self, places: torch.Tensor) -> torch.Tensor:
        """Return the domains of tokens at these places, of any shape; int64."""
        return self.of_files[torch.searchsorted(self.ends, places + self.first, right=True)]


@dataclass(frozen=True)
class Corpus:
    """Streams of token ids, mapped into memory."""

    train: torch.Tensor  # ``[tokens]``
    validation: torch.Tensor  # ``[tokens]``, maybe empty
    vocab_size: int | None  # ids are less than this; ``None``: files of tokens do not say
    end: int | None  # the token that ends each document; ``None``: likewise
    identity: str  # changes when the tokens do
    # Of the tokens of ``train``, then ``validation``; ``None`` without ``data.domains``
    domains: tuple[Domains | None, Domains | None] = (None, None)


def prepare(data: DataConfig, cache: Path) -> None:
    """Make the files of tokens that ``open_corpus`` maps, unless they are there already.

    Raises:
        InputError: a file is missing, empty or not UTF-8, or the tokenizer cannot be read.
    """
    for paths in filter(None, (data.train, data.validation)):
        files = _expand(paths)
        if not _are_tokens(files):
            tokenizer = tokenizer_of(data)
            stem = _stem(files, tokenizer, data, cache)
            if not all(stem.with_suffix(suffix).exists() for suffix in (".json", TOKENS)):
                _write_tokens(files, tokenizer, data.errors, stem)


def open_corpus(data: DataConfig, cache: Path) -> Corpus:
    """Return the corpus; text must have been prepared, in a folder that this process sees.

    Raises:
        InputError: what it is made of is not there, or too short.
    """
    train, identity, of_train = _open(data, data.train, cache)
    if data.validation:
        validation, _, of_validation = _open(data, data.validation, cache)
    else:
        kept = len(train) - int(len(train) * data.validation_share)
        train, validation = train[:kept], train[kept:]
        of_validation = None if of_train is None else replace(of_train, first=kept)
    parts = [("the corpus is too short", train, "tokens to train on")]
    if data.validation:
        parts.append(("data.validation is too short", validation, "tokens"))
    for what, tokens, kind in parts:
        if len(tokens) <= data.seq_len:
            raise InputError(
                f"{what}: {len(tokens)} {kind}, and a sequence with its last target takes "
                f"{data.seq_len + 1}: give more text, or make data.seq_len smaller"
            )
    given = _are_tokens(_expand(data.train)) and data.tokenizer == BYTES
    if given and data.documents:
        raise InputError(
            "data.documents needs data.tokenizer where data.train is a file of tokens: its "
            "data.end_of_text is what ends a document"
        )
    tokenizer = None if given else tokenizer_of(data)
    size, end = (None, None) if tokenizer is None else (tokenizer.size, tokenizer.end)
    return Corpus(train, validation, size, end, identity, (of_train, of_validation))


def check_ids(corpus: Corpus, vocab_size: int, share: int = 0, shares: int = 1) -> None:
    """Raise an ``InputError`` for an id, in a share of all tokens, that the model does not have."""
    for name, stream in (("train", corpus.train), ("validation", corpus.validation)):
        first, last = (len(stream) * index // shares for index in (share, share + 1))
        for start in range(first, last, _SCAN):
            part = stream[start : min(last, start + _SCAN)].long()
            low, high = (int(bound) for bound in part.aminmax())
            if low < 0 or high >= vocab_size:
                place = int(((part < 0) | (part >= vocab_size)).nonzero()[0])
                raise InputError(
                    f"the {name} tokens must be in [0, {vocab_size}), the model's vocabulary: "
                    f"number {start + place} is {int(part[place])}; make "
                    "model.vocab_size larger, or use the files of its tokenizer"
                )


def _open(
    data: DataConfig, entries: Sequence[str], cache: Path
) -> tuple[torch.Tensor, str, Domains | None]:
    """Return the tokens that entries became, their identity, and their domains if asked for."""
    files, domains = _expand(entries), None
    if _are_tokens(files):
        if len(files) > 1:
            raise InputError(
                f"one file of tokens must be given, got {len(files)}: {files[0]} ...; "
                "concatenate them"
            )
        if data.domains:
            raise InputError("data.domains must be false for a file of tokens, which has no files")
        dtype, path = getattr(torch, data.token_dtype), files[0]
        identity = _sampled(path)
    else:
        tokenizer = tokenizer_of(data)
        stem = _stem(files, tokenizer, data, cache)
        dtype, path = _dtype_for(tokenizer.size), stem.with_suffix(TOKENS)
        try:
            record = json.loads(stem.with_suffix(".json").read_text())
            is_complete = path.stat().st_size == record["tokens"] * dtype.itemsize
        except (OSError, ValueError):
            is_complete = False
        if not is_complete:
            raise InputError(
                f"the tokens in {cache} are missing or incomplete: all processes must see that "
                "folder; remove it to tokenize again"
            )
        identity = record["identity"]
        domains = _domains(entries, record["ends"]) if data.domains else None
    size, odd = divmod(path.stat().st_size, dtype.itemsize)
    if odd or not size:
        raise InputError(
            f"{path} must hold one or more tokens of {dtype.itemsize} bytes each "
            f"({str(dtype).removeprefix('torch.')}), got {path.stat().st_size} bytes"
        )
    # Private: mapped, and never written.
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype), identity, domains


def _domains(entries: Sequence[str], ends: Sequence[tuple[str, int]]) -> Domains:
    """Return the domains of the tokens of files, given where they end: each entry is one."""
    number: dict[str, int] = {}
    for domain, entry in enumerate(entries):
        for path in _expand([entry]):
            if number.setdefault(str(path), domain) != domain:
                raise InputError(
                    f"data.domains: {path} must be of one entry of the corpus, got "
                    f"{entries[number[str(path)]]} and {entry}"
                )
    names, places = zip(*ends, strict=True)
    return Domains(torch.tensor(places), torch.tensor([number[name] for name in names]))


def _expand(paths: Iterable[str]) -> list[Path]:
    """Return the files that are meant, without hidden ones and what runs wrote."""
    expanded: dict[Path, None] = {}
    for entry in paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            if is_run_folder(path):
                raise InputError(
                    f"the corpus {entry} must not be the folder of a run, which writes into it: "
                    "give the files or folders of the text in it, or choose another out"
                )
            files = _matching(f"{glob.escape(str(path))}/**", path)
        elif path.is_file():
            files = [path]
        else:
            root = path
            while glob.has_magic(str(root)):
                root = root.parent
            files = _matching(str(path), root)
        if not files:
            why = "holds no files" if path.is_dir() else "does not exist"
            raise InputError(f"the corpus {entry} {why}: correct data.train or data.validation")
        expanded.update(dict.fromkeys(files))
    return list(expanded)


def _matching(pattern: str, root: Path) -> list[Path]:
    """Return the files of a pattern, without caches of tokens and runs' folders below ``root``."""

    @functools.cache
    def is_of_run(folder: Path) -> bool:
        return root in folder.parents and (is_run_folder(folder) or is_of_run(folder.parent))

    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in paths if path.is_file() and not is_of_run(path.parent)]
    return [file for file in files if not _CACHED.fullmatch(file.name)]


def _are_tokens(files: list[Path]) -> bool:
    kinds = {file.suffix == TOKENS for file in files}
    if len(kinds) > 1:
        raise InputError(
            "text and files of tokens (.bin) cannot be mixed in one corpus: give one kind"
        )
    return kinds == {True}


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """Return what turns text into tokens."""
    if data.tokenizer == BYTES:
        return Tokenizer(257, 256, lambda texts: [_ids_of(text) for text in texts], BYTES)
    tokenizer, text = open_tokenizer(data.tokenizer)
    end = tokenizer.token_to_id(data.end_of_text)
    if end is None:
        raise InputError(
            f"data.end_of_text must be a token of {data.tokenizer}, got {data.end_of_text!r}"
        )

    def encode(texts: list[str]) -> list[torch.Tensor]:
        return [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(texts)]

    digest = hashlib.sha256(text.encode()).hexdigest()
    # Not the number of its entries: ids may leave gaps.
    size = 1 + max(tokenizer.get_vocab().values())
    return Tokenizer(size, end, encode, f"{digest} {end}")


def open_tokenizer(path: str) -> tuple[Any, str]:
    """Return the tokenizer of a ``tokenizer.json``, and what the file says.

    The file may also store how someone prepared batches: truncation, padding, and merges that are
    left out at random. These are no part of the tokenizer and are switched off.

    Raises:
        InputError: it cannot be read, or the package tokenizers is missing.
    """
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            "data.tokenizer needs the package tokenizers (pip install tokenizers), or 'bytes'"
        ) from None
    try:
        text = Path(path).read_text(encoding="utf-8")
        # The package raises bare Exceptions.
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"the tokenizer {path} cannot be read: {why}; give a tokenizer.json, or 'bytes'"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    return tokenizer, text


def _ids_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0)


def _dtype_for(vocab_size: int) -> torch.dtype:
    return torch.uint16 if vocab_size <= 1 << 16 else torch.int32


def _sampled(path: Path) -> str:
    """Return what changes with the contents of a file of tokens: its size, and parts of it."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}".encode())
    with path.open("rb") as file:
        for part in range(_SAMPLES):
            file.seek(part * max(0, size - _SAMPLE) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _stem(files: list[Path], tokenizer: Tokenizer, data: DataConfig, cache: Path) -> Path:
    """Return the path, without suffix, of what becomes of files; another when one has changed."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = f"{_VERSION} {stats} {tokenizer.identity} {data.errors}"
    return cache / f"tokens-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _write_tokens(files: list[Path], tokenizer: Tokenizer, errors: str, stem: Path) -> None:
    """Write tokens and then the record that says that they are complete."""
    dtype = _dtype_for(tokenizer.size)
    ordered = []
    for path in files:
        content = _read(path, errors)
        if content is None:
            _log.warning("%s is left out: it is not UTF-8", path)
        elif content.strip():
            ordered.append((hashlib.sha256(content.encode()).hexdigest(), path))
    if not ordered:
        raise InputError(
            f"the corpus is empty: no text in {len(files)} files, such as {files[0]}; "
            "give other files"
        )
    ordered.sort()
    aside = stem.with_suffix(f".{os.getpid()}.part")
    count, ends = 0, []
    end = torch.tensor([tokenizer.end], dtype=dtype)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            for first in range(0, len(ordered), _FILES_AT_ONCE):
                batch = [path for _, path in ordered[first : first + _FILES_AT_ONCE]]
                encoded = tokenizer.encode([_read(path, errors) or "" for path in batch])
                for path, ids in zip(batch, encoded, strict=True):
                    tokens = torch.cat([ids.to(dtype), end])
                    file.write(tokens.numpy().tobytes())
                    count += len(tokens)
                    ends.append((str(path), count))
        aside.rename(stem.with_suffix(TOKENS))
        contents = f"{tokenizer.identity} {[digest for digest, _ in ordered]}"
        identity = hashlib.sha256(contents.encode()).hexdigest()
        aside.write_text(json.dumps({"tokens": count, "ends": ends, "identity": identity}))
        aside.rename(stem.with_suffix(".json"))
    except OSError as error:
        raise InputError(
            f"cannot write {stem.parent}: {error.strerror or error}; "
            "set data.cache to another folder"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _read(path: Path, errors: str) -> str | None:
    """Return a file's text; ``None``: it is not UTF-8, and to be skipped."""
    try:
        content = path.read_bytes()
        return content.decode("utf-8", errors="replace" if errors == "replace" else "strict")
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}; check its permissions, or leave it out"
        ) from None
    except UnicodeDecodeError as error:
        if errors == "skip":
            return None
        raise InputError(
            f"{path} is not UTF-8: byte {error.start}; data.errors = 'replace' reads it all the "
            "same, and 'skip' leaves such files out"
        ) from None
