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
    """What a model's tokens mean.

    Attributes:
        encode: a text to its tokens.
        decoder: takes the tokens of a prompt, and returns a function that is given those after it
            one by one and gives the text that is known by then; ``None`` says that there are no
            more.
        stop: tokens at which a text ends.
    """

    encode: Callable[[str], list[int]]
    decoder: Callable[[Sequence[int]], Callable[[int | None], str]]
    stop: tuple[int, ...]

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
        found, _ = open_tokenizer(tokenizer)
        end = found.token_to_id(end_of_text)
        ends = (*stop, *([] if end is None else [end]))
        return Text(
            lambda text: found.encode(text).ids, lambda prompt: _of_pieces(found, prompt), ends
        )


def _of_bytes(prompt: Sequence[int]) -> Callable[[int | None], str]:
    # A letter may have four bytes: what is not whole yet waits.
    whole = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(token: int | None) -> str:
        if token is None:
            return whole.decode(b"", final=True)
        return whole.decode(bytes([token])) if token < _BYTES else ""

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
        if piece is None:  # a letter is not whole
            waiting.append(token)
            return ""
        waiting.clear()
        return piece

    return decode


class Words:
    """The text of a sequence as its tokens come, up to the first of some strings.

    Args:
        text: what the tokens mean.
        stops: strings that end it; they are no part of it.
        prompt: tokens that the sequence goes on from; their text is no part of it.

    Attributes:
        ended: whether one has come.
    """

    def __init__(self, text: Text, stops: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self.ended = False
        self._decode = text.decoder(prompt)
        self._stops = [each for each in stops if each]
        self._held = ""
        self._fresh = ""

    def feed(self, token: int | None) -> bool:
        """Take a token, ``None`` after the last; returns whether the text ends with it."""
        if self.ended:
            return True
        self._held += self._decode(token)
        places = [self._held.find(each) for each in self._stops]
        found = [place for place in places if place >= 0]
        if found:
            self._fresh += self._held[: min(found)]
            self._held, self.ended = "", True
        else:
            sure = len(self._held) - (0 if token is None else self._begun())
            self._fresh += self._held[:sure]
            self._held = self._held[sure:]
        return self.ended

    def take(self) -> str:
        """Return what has become known since the last time."""
        fresh, self._fresh = self._fresh, ""
        return fresh

    def _begun(self) -> int:
        """Return how many letters at the end may be the beginning of a string that ends it."""
        longest = max((len(each) for each in self._stops), default=0)
        for size in range(min(longest - 1, len(self._held)), 0, -1):
            if any(each.startswith(self._held[-size:]) for each in self._stops):
                return size
        return 0
