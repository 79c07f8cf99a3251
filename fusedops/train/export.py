"""What a finished run leaves for other programs: weights, tokenizer, and where a text ends.

The folder is one that transformers reads, and ``fusedops generate``. A corpus that was given as
tokens does not say what they mean: then there are weights alone, unless ``data.tokenizer`` does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fusedops.launch.config_table import InputError
from fusedops.models import save_huggingface
from fusedops.train import corpus
from fusedops.train.config import Config

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_END = "<|endoftext|>"


def export(model: Any, config: Config, *, first: bool, has_tokenizer: bool) -> None:
    """Write a trained model to ``config.export``; all ranks call this.

    The ``first`` also writes the other files of the folder, if the run has a tokenizer.

    Raises:
        InputError: the tokenizer or a file cannot be read or written.
    """
    save_huggingface(model, config.export)
    data = config.data
    if not (first and has_tokenizer):
        return
    folder = Path(config.export)
    try:
        if data.tokenizer == corpus.BYTES:
            _write(folder / _TOKENIZER, byte_tokenizer())
            _write(folder / _SETTINGS, _settings(_END))
        else:
            _copy_tokenizer(Path(data.tokenizer), folder, data.end_of_text)
        ends = {"bos_token_id": None, "eos_token_id": corpus.tokenizer_of(data).end}
        _write(folder / "generation_config.json", ends)
        # Else transformers takes the tokens of the family's first model.
        _write(folder / _CONFIG, json.loads((folder / _CONFIG).read_bytes()) | ends)
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"the weights are in {folder}, and the tokenizer {data.tokenizer} cannot be written "
            f"there: {why}"
        ) from None


def byte_tokenizer() -> dict[str, Any]:
    """Return the bytes, and a token behind them that ends a text, as a ``tokenizer.json`` says it.

    The package tokenizers writes each byte as a printable letter: GPT-2's alphabet.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [index for index in range(256) if index not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    end = {"id": 256, "content": _END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": level | {"use_regex": False},
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }


def _settings(end: str) -> dict[str, Any]:
    """Return what transformers needs to know of a ``tokenizer.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }


def _copy_tokenizer(source: Path, folder: Path, end: str) -> None:
    target = folder / _TOKENIZER
    if target.exists() and source.samefile(target):
        return
    shutil.copyfile(source, target)
    settings = source.with_name(_SETTINGS)
    if settings.is_file():
        shutil.copyfile(settings, folder / _SETTINGS)
    else:
        _write(folder / _SETTINGS, _settings(end))


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
