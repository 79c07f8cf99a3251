"""Between text and tokens, a token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusedops.train.corpus import BYTES, open_tokenizer

_BYTES = 256


@dataclass(frozen=True)
class Text:
    """What a model's tokens mean."""

    encode: Callable[[str], list[int]]  # a text to its tokens
    # Takes the tokens of a prompt, and returns a function that is given those after it one by one
    # and gives the text that is known by then; ``None`` says that there are no more
    decoder: Callable[[Sequence[int]], Callable[[int | None], str]]
    stop: tuple[int, ...]  # tokens at which a text ends

    @staticmethod
    def of(tokenizer: str, stop: Sequence[int] = (), *, end_of_text: str = "") -> Text:
        """Return that of a tokenizer.

        Args:
            tokenizer: ``"bytes"``, or a ``tokenizer.json``.
            stop: tokens at which a text ends.
            end_of_text: one more, by its name; there need not be one of it.

        Raises:
            InputError: it cannot be read.
        """
        if tokenizer == BYTES:
            return Text(lambda text: list(text.encode()), _of_bytes, tuple(stop) or (_BYTES,))
        opened, _ = open_tokenizer(tokenizer)
        end = opened.token_to_id(end_of_text)
        stop = (*stop, *([] if end is None else [end]))
        return Text(
            lambda text: opened.encode(text).ids, lambda prompt: _of_pieces(opened, prompt), stop
        )


def _of_bytes(prompt: Sequence[int]) -> Callable[[int | None], str]:
    # A character may have four bytes: incomplete ones wait.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(token: int | None) -> str:
        if token is None:
            return decoder.decode(b"", final=True)
        return decoder.decode(bytes([token])) if token < _BYTES else ""

    return decode


def _of_pieces(tokenizer: Any, prompt: Sequence[int]) -> Callable[[int | None], str]:
    from tokenizers.decoders import DecodeStream

    pieces = DecodeStream(skip_special_tokens=True)
    # A text's first piece loses the space before it: the prompt's is the first one.
    for token in prompt:
        pieces.step(tokenizer, token)

    waiting: list[int] = []

    def decode(token: int | None) -> str:
        if token is None:
            return tokenizer.decode(waiting)
        piece = pieces.step(tokenizer, token)
        if piece is None:  # a character is incomplete
            waiting.append(token)
            return ""
        waiting.clear()
        return piece

    return decode


class TextStream:
    """The text of a sequence as its tokens come, up to the first of some strings.

    Args:
        text: what the tokens mean.
        stops: strings that end it; they are no part of it.
        prompt: tokens that the sequence continues; their text is no part of it.

    Attributes:
        ended: whether one has come.
    """

    def __init__(self, text: Text, stops: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self.ended = False
        self._decode = text.decoder(prompt)
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self._ready = ""

    def feed(self, token: int | None) -> bool:
        """Take a token, ``None`` after the last; returns whether the text ends with it."""
        if self.ended:
            return True
        self._pending += self._decode(token)
        indices = [self._pending.find(stop) for stop in self._stops]
        matches = [index for index in indices if index >= 0]
        if matches:
            self._ready += self._pending[: min(matches)]
            self._pending, self.ended = "", True
        else:
            count = len(self._pending) - (0 if token is None else self._partial_stop())
            self._ready += self._pending[:count]
            self._pending = self._pending[count:]
        return self.ended

    def take(self) -> str:
        """Return what has become known since the last time."""
        ready, self._ready = self._ready, ""
        return ready

    def _partial_stop(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        ends = [self._pending[index:] for index in range(len(self._pending))]
        return next((len(end) for end in ends if any(s.startswith(end) for s in self._stops)), 0)
