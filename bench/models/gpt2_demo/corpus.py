"""Python source as training text: files, split, byte-pair vocabulary, token streams, cache.

The default corpus is the source of the installed sympy package (26 MB, BSD-3-Clause), which comes
with torch, so nothing is downloaded. A file belongs to the validation set by the hash of its
content: the split needs no list, and equal files never stand on both sides.
"""

import hashlib
import importlib.util
import io
import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fusedops.terminal.files import UserError, replacing

END_OF_TEXT = "<|endoftext|>"
VALIDATION_PERCENT = 5
VOCABULARY_SAMPLE_BYTES = 3_000_000
CACHE_VERSION = 1


class SourceFile(NamedTuple):
    """One file of the corpus."""

    name: str
    text: str
    digest: str


@dataclass(frozen=True)
class Corpus:
    """Token streams and their vocabulary.

    Attributes:
        train: ``[tokens]`` int32, the files in a seeded order, each followed by END_OF_TEXT.
        validation: ``[tokens]`` int32, files of which no text is in ``train``.
        tokenizer: the byte-level byte-pair tokenizer.
        description: where the text comes from, for people.
        num_files: files with text in the corpus, before any sampling.
        num_bytes: their size.
    """

    train: torch.Tensor
    validation: torch.Tensor
    tokenizer: Tokenizer
    description: str
    num_files: int
    num_bytes: int

    def batch(self, step: int, *, seed: int, batch_size: int, seq_len: int) -> torch.Tensor:
        """Return the training batch of ``step``: the same for every variant and every run.

        Returns:
            ``[batch_size, seq_len]`` int64 token ids at random offsets.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        last = self.train.numel() - seq_len
        starts = torch.randint(0, last + 1, (batch_size,), generator=generator)
        return torch.stack([self.train[start : start + seq_len] for start in starts]).long()

    def validation_batches(
        self, *, batch_size: int, seq_len: int, max_batches: int
    ) -> list[torch.Tensor]:
        """Return evenly spaced windows of the validation stream, the same in every run."""
        windows = self.validation.unfold(0, seq_len, seq_len)
        wanted = min(len(windows), batch_size * max_batches)
        picks = torch.linspace(0, len(windows) - 1, wanted).round().long()
        return list(windows[picks].long().split(batch_size))


def default_directory() -> Path:
    """Return the directory of the installed sympy package.

    Raises:
        UserError: sympy is not installed.
    """
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the corpus is the source of the sympy package, which is not installed: "
            "pip install sympy, or give a directory of Python files with --corpus"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def read_files(directory: Path) -> list[SourceFile]:
    """Read every ``.py`` file under ``directory`` that has text, in the order of their names.

    Raises:
        UserError: the directory is absent, unreadable, or holds no Python text.
    """
    if not directory.is_dir():
        raise UserError(f"the corpus directory {directory} does not exist or is not a directory")
    files = []
    try:
        for path in sorted(directory.rglob("*.py")):
            raw = path.read_bytes()
            text = raw.decode("utf-8", errors="replace")
            if text.strip():
                digest = hashlib.sha256(raw).hexdigest()
                files.append(SourceFile(str(path.relative_to(directory)), text, digest))
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"cannot read the corpus in {directory}: {why}") from None
    if not files:
        raise UserError(f"the corpus directory {directory} holds no Python files with text")
    return files


def is_validation(file: SourceFile) -> bool:
    """Tell whether the hash of the file's content puts it into the validation set."""
    return int(file.digest[:8], 16) % 100 < VALIDATION_PERCENT


def _take(files: list[SourceFile], max_bytes: int) -> list[str]:
    """Return the texts of the first files that hold at least ``max_bytes`` together."""
    texts, total = [], 0
    for file in files:
        if total >= max_bytes:
            break
        texts.append(file.text)
        total += len(file.text)
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level byte-pair vocabulary of ``vocab_size`` entries from ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    end = tokenizer.token_to_id(END_OF_TEXT)
    streams = [
        torch.tensor([*e.ids, end], dtype=torch.int32) for e in tokenizer.encode_batch(texts)
    ]
    return torch.cat(streams) if streams else torch.empty(0, dtype=torch.int32)


def _load(cache: Path) -> dict | None:
    """Return what an earlier run left, or None; a damaged cache is built anew."""
    try:
        return torch.load(cache, weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError):
        return None


@dataclass(frozen=True)
class Source:
    """Where a corpus comes from and how it is tokenized.

    Attributes:
        directory: tree of Python files; None for the installed sympy.
        cache: directory where the tokens are kept, under a key of the content of all files.
        vocab_size: entries of the byte-pair vocabulary (small corpora yield fewer).
        train_bytes: training text to tokenize; files are sampled in a seeded order.
        min_tokens: tokens that each side of the split must have.
        seed: of the order of the files.
    """

    directory: Path | None
    cache: Path
    vocab_size: int
    train_bytes: int
    min_tokens: int
    seed: int


def load_corpus(source: Source) -> Corpus:
    """Read, split and tokenize the corpus, or take the tokens that an earlier run left.

    Raises:
        UserError: no corpus, or too little text for one sequence.
    """
    where = source.directory or default_directory()
    files = read_files(where)
    num_bytes = sum(len(file.text.encode()) for file in files)
    description = f"{'sympy' if source.directory is None else where}: {len(files)} files"
    description += f", {num_bytes / 1e6:.1f} MB"

    key = hashlib.sha256(
        repr((CACHE_VERSION, source.vocab_size, source.train_bytes, source.seed)).encode()
        + b"".join(file.digest.encode() for file in files)
    ).hexdigest()[:16]
    cache = source.cache / f"corpus-{key}.pt"
    state = _load(cache)
    if state is None:
        random.Random(source.seed).shuffle(files)
        train = [file for file in files if not is_validation(file)]
        validation = [file for file in files if is_validation(file)]
        tokenizer = train_tokenizer(_take(train, VOCABULARY_SAMPLE_BYTES), source.vocab_size)
        state = {
            "tokenizer": tokenizer.to_str(),
            "train": _encode(tokenizer, _take(train, source.train_bytes)),
            "validation": _encode(tokenizer, [file.text for file in validation]),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        with replacing(cache) as file:
            file.write(buffer.getvalue())

    for side in ("train", "validation"):
        if state[side].numel() < source.min_tokens:
            raise UserError(
                f"the corpus in {where} is too small: {state[side].numel()} {side} tokens, "
                f"and one sequence takes {source.min_tokens}"
            )
    return Corpus(
        train=state["train"],
        validation=state["validation"],
        tokenizer=Tokenizer.from_str(state["tokenizer"]),
        description=description,
        num_files=len(files),
        num_bytes=num_bytes,
    )
