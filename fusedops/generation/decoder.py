"""Incremental inference: a model is given each token once, and says what may follow.

Two phases: ``prefill`` takes the prompts, whole and of any lengths, ``step`` one token of each.
Prompts lie behind one another without padding, so that a row's numbers do not depend on the others.
A ``Decoder`` reaches into the model where ``parallelize`` does (``docs/models.md``), for the time
of a call: a model that is spread over processes is called in the same way, by all of them.

Letters of shapes: R rows, T tokens of a call, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import checks
from fusedops.generation.cache import Cache, Call
from fusedops.generation.options import Options
from fusedops.models import Transformer, parallelized
from fusedops.nn import MoE


class Decoder:
    """A model and the cache of some sequences that it goes on with.

    Args:
        model: a causal ``Transformer``, or what ``parallelize`` made of one; not changed. Every
            process of ``tp``, ``dp`` and ``ep`` makes the same calls, with rows of its own.
        most: tokens that a row may come to.
        capacity: of the cache; ``None``: it grows as it is needed.
    """

    def __init__(self, model: Transformer, most: int, capacity: int | None = None) -> None:
        self.model: Any = model
        self._layers: list[Any] = list(self.model.layers.values())
        sparse = [each for each in self.model.modules() if isinstance(each, MoE)]
        self._gates = [each.gate for each in sparse if each.gate is not None]
        self._device = self.model.embedding.tokens.weight.device
        found = parallelized(model)
        config = found.config
        # FSDP2 counts the versions of what it gathers, and tensors of inference have none.
        self._mode = torch.inference_mode if found.mesh is None else torch.no_grad
        # Ranks of tp share the tokens of sequences, or of experts.
        self._unit = config.tp if config.sp or sparse else 1
        self._gathers = config.sp
        self._cache = Cache(len(self._layers), capacity, most)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._longest = 0

    @property
    def cache(self) -> Cache:
        """Keys and values so far."""
        return self._cache

    def prefill(self, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Take the prompts, int64 ``[tokens]`` each; returns the logits after them, ``[R, V]``."""
        lengths = [len(each) for each in prompts]
        self._lengths = self._new(lengths)
        self._longest = max(lengths, default=0)
        self._cache.reserve(self._longest)
        total = sum(lengths)
        padding = self._padding(total)
        ends = self._new([0, *lengths, *([padding] if padding else [])]).cumsum(0).int()
        rows = self._new(range(len(lengths))).repeat_interleave(self._lengths)
        positions = torch.arange(total, device=self._device) - ends[:-1].long()[rows]
        call = Call(rows, positions, ends, max(self._longest, padding), self._lengths)
        tokens = torch.cat([*prompts, self._new([])]).to(self._device)
        return self._run(tokens, call, ends[1 : len(lengths) + 1].long() - 1)

    def step(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Take the next token of each row, ``[R]`` int64; returns the logits after it, ``[R, V]``.

        Each token costs the same, whatever came before it; attention alone reads what did.
        """
        positions = self._lengths
        self._longest += 1
        self._cache.reserve(self._longest)
        self._lengths = positions + 1
        rows = torch.arange(len(tokens_R), device=self._device)
        call = Call(rows, positions, None, 1, self._lengths)
        return self._run(tokens_R, call, rows)

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows, in this order; some may be left out or stand several times."""
        with self._mode():
            self._cache.select(rows, self._longest)
            self._lengths = self._lengths[rows]

    def _new(self, values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)

    def _padding(self, tokens: int) -> int:
        """Return how many tokens are missing for all ranks to have as many, and one at least."""
        return -tokens % self._unit if tokens else self._unit

    def _run(self, tokens_T: torch.Tensor, call: Call, wanted_R: torch.Tensor) -> torch.Tensor:
        """Return the logits of the wanted tokens."""
        positions_T = call.positions
        padding = self._padding(len(tokens_T))
        if padding:
            tokens_T, positions_T = (F.pad(each, (0, padding)) for each in (tokens_T, positions_T))
        # A rank without rows asks for the padding's, so that no communication is empty.
        asked_R = wanted_R if len(wanted_R) else self._new([0])
        whole = len(asked_R) == len(tokens_T)

        def project(x_1TH: torch.Tensor, *parameters: Any) -> torch.Tensor:
            if self._gathers or whole:
                return before(x_1TH, *parameters)
            return before(x_1TH[:, asked_R], *parameters)

        before: Callable[..., torch.Tensor] = self.model.head.project
        with self._mode(), self._standing_in(call, project):
            logits_RV = self.model(tokens_T.unsqueeze(0), positions=positions_T)[0]
            if self._gathers and not whole:
                logits_RV = logits_RV[asked_R]
            return logits_RV[: len(wanted_R)]

    @contextmanager
    def _standing_in(self, call: Call, project: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Let the model attend the cache, make the logits that are wanted and drop no token.

        Instances' own attributes: ``nn.Module`` looks at what it is given, which takes as long as a
        small product.
        """
        places = [layer.attention.__dict__ for layer in self._layers]
        cores = [each["core"] for each in places]
        head = self.model.head.__dict__
        before = head["project"]
        options = [gate.options for gate in self._gates]
        try:
            head["project"] = project
            for index, place in enumerate(places):
                place["core"] = self._cache.core(index, call)
            for gate, each in zip(self._gates, options, strict=True):
                gate.options = each | {"capacity_factor": None}
            yield
        finally:
            head["project"] = before
            for place, core in zip(places, cores, strict=True):
                place["core"] = core
            for gate, each in zip(self._gates, options, strict=True):
                gate.options = each


class Recomputed:
    """Stands for a ``Decoder`` and keeps no keys: each step begins anew. To compare with.

    Args:
        model: as of ``Decoder``.
        most: as of ``Decoder``.
    """

    def __init__(self, model: Transformer, most: int) -> None:
        self._model, self._most = model, most
        self._rows: list[torch.Tensor] = []

    def prefill(self, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Do as ``Decoder.prefill``."""
        self._rows = list(prompts)
        return Decoder(self._model, self._most).prefill(self._rows)

    def step(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Do as ``Decoder.step``."""
        new = tokens_R.to("cpu").split(1)
        return self.prefill([torch.cat(pair) for pair in zip(self._rows, new, strict=True)])

    def select(self, rows: torch.Tensor) -> None:
        """Do as ``Decoder.select``."""
        self._rows = [self._rows[each] for each in rows.tolist()]


def decoder_for(model: Transformer, most: int, options: Options) -> Decoder | Recomputed:
    """Return what ``options`` ask for."""
    if options.cache:
        return Decoder(model, most, options.cache_size)
    return Recomputed(model, most)


def check_model(op: str, model: Any) -> None:
    """Raise unless tokens can be generated by a model, as it is spread over processes."""
    if not isinstance(model, Transformer):
        got = checks.type_name(model)
        raise TypeError(f"{op}: model must be a fusedops.models.Transformer, got {got}")
    if not model.config.causal or model.config.head != "causal":
        raise ValueError(f"{op}: model must be a decoder (causal), got an encoder")
    config = parallelized(model).config
    for name, size in (("cp", config.cp), ("pp", config.pp)):
        if size > 1:
            raise checks.UnsupportedError(
                f"{op}: {name} must be 1, got {size}: spread the model anew, by tp, dp or ep; a "
                "checkpoint of any layout loads into any other"
            )
