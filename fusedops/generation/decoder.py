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
from torch import nn

from fusedops._core import checks
from fusedops.generation.cache import Cache, Call
from fusedops.generation.options import Options
from fusedops.generation.sampling import gathers
from fusedops.models import Transformer
from fusedops.models.parallelization.engine import parallelized
from fusedops.nn import MoE
from fusedops.parallel.tensor.vocabulary import VocabParallelProjection

_OP = "Decoder"


class Decoder:
    """A model and the cache of some sequences that it goes on with.

    Args:
        model: a causal ``Transformer``, or what ``parallelize`` made of one; not changed. Every
            process makes the same calls: those of ``dp``, ``cp`` and ``ep`` with rows of their own,
            those of ``tp`` and ``pp`` with the same. With ``pp`` the ranks of the last stage get
            logits, the others ``[R, 0]``.
        most: tokens that a row may come to.
        capacity: of the cache, ``most`` at most; ``None``: it grows as it is needed.
        divided: where ``tp`` divides the words, give each rank the logits of its own alone.

    Attributes:
        words: how they are divided then; ``None``: logits are of all words.

    Raises:
        TypeError: ``model`` is no ``Transformer``, or a size no integer.
        ValueError: ``model`` is no decoder, a size is less than 1, or ``most`` is above the model's
            table of positions.
        UnsupportedError: ``model`` has ``domain_experts``.
    """

    def __init__(
        self,
        model: Transformer,
        most: int,
        capacity: int | None = None,
        *,
        divided: bool = False,
    ) -> None:
        check_model(_OP, model)
        checks.integer(_OP, "most", most, least=1)
        if model.config.position_tables and most > model.config.seq_len:
            wanted = f"at most {model.config.seq_len}, the model's table of positions"
            checks.fail(_OP, "most", wanted, most)
        if capacity is not None:
            checks.integer(_OP, "capacity", capacity, least=1)
        self.model: Any = model
        self._layers: list[Any] = list(self.model.layers.values())
        sparse = [each for each in self.model.modules() if isinstance(each, MoE)]
        self._gates = [each.gate for each in sparse if each.gate is not None]
        self._device = device_of(model)
        self._split = split_words(model)
        self.words = self._split if divided else None
        found = parallelized(model)
        config = found.config
        self._pipeline = found.pipeline
        # FSDP2 counts the versions of what it gathers, and tensors of inference have none.
        self._mode = torch.inference_mode if found.mesh is None else torch.no_grad
        # Ranks of tp share the tokens of sequences, or of experts.
        self._unit = config.tp if config.sp or sparse else 1
        self._room = None if capacity is None else min(capacity, most), most
        self._cache = Cache(len(self._layers), *self._room)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._longest, self._even = 0, False

    @property
    def cache(self) -> Cache:
        """Keys and values so far."""
        return self._cache

    def prefill(self, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Take the prompts, int64 ``[tokens]`` each; returns the logits after them, ``[R, V]``.

        What the cache held before is forgotten.

        Raises:
            ValueError: a prompt is empty, or longer than a row may come to.
            TypeError: one is no tensor of int64.
        """
        for number, each in enumerate(prompts):
            name = f"prompt {number}"
            checks.index_tensor(_OP, name, each, dtypes=(torch.int64,))
            if each.dim() != 1 or not len(each):
                checks.fail(_OP, name, "of shape [tokens], one token at least", list(each.shape))
        self._cache = Cache(len(self._layers), *self._room)
        lengths = [len(each) for each in prompts]
        self._lengths = self._new(lengths)
        self._longest = max(lengths, default=0)
        self._even = len(set(lengths)) == 1
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

        Raises:
            ValueError: these are not as many as there are rows, or a row is as long as it may be.
            TypeError: they are no tensor of int64.
        """
        checks.index_tensor(_OP, "tokens", tokens_R, dtypes=(torch.int64,))
        if len(tokens_R) != len(self._lengths):
            checks.fail(_OP, "tokens", f"one for each of {len(self._lengths)} rows", len(tokens_R))
        positions = self._lengths
        self._cache.reserve(self._longest + 1)
        self._longest += 1
        self._lengths = positions + 1
        rows = torch.arange(len(tokens_R), device=self._device)
        place = self._longest - 1 if self._even else None
        call = Call(rows, positions, None, 1, self._lengths, place)
        return self._run(tokens_R, call, rows)

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows, in this order; some may be left out or stand several times.

        Raises:
            ValueError: (CPU) one is no row.
            TypeError: they are no tensor of int64.
        """
        checks.index_tensor(_OP, "rows", rows, dtypes=(torch.int64,))
        if checks.readable(rows) and rows.numel():
            least, most = (int(each) for each in rows.aminmax())
            count = len(self._lengths)
            if least < 0 or most >= count:
                wanted = f"at least 0 and less than {count}, the rows so far"
                checks.fail(_OP, "rows", wanted, least if least < 0 else most)
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
        all_are = len(asked_R) == len(tokens_T)

        def project(x_1TH: torch.Tensor, *parameters: Any) -> torch.Tensor:
            split = self._split
            x_1TH = x_1TH if split is None else split.gather_hidden(x_1TH)
            x_1RH = x_1TH if all_are else x_1TH[:, asked_R]
            if split is None:
                return before(x_1RH, *parameters)
            part_1RW = split.local_logits(x_1RH, *parameters)
            return part_1RW if self.words is not None else split.gather_logits(part_1RW)

        before: Any = None if self.model.head is None else self.model.head.project
        with self._mode(), self._standing_in(call, project):
            tokens_1T = tokens_T.unsqueeze(0)
            if self._pipeline is None:
                logits_1RV = self.model(tokens_1T, positions=positions_T)
            else:
                logits_1RV = self._pipeline.logits(tokens_1T, positions_T)
            if logits_1RV is None:
                return torch.empty(len(wanted_R), 0, device=self._device)
            return logits_1RV[0, : len(wanted_R)]

    @contextmanager
    def _standing_in(self, call: Call, project: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Let the model attend the cache, make the logits that are wanted and drop no token.

        Instances' own attributes: ``nn.Module`` looks at what it is given, which takes as long as a
        small product.
        """
        places = [layer.attention.__dict__ for layer in self._layers]
        cores = [each["core"] for each in places]
        # Of a stage that has no head nothing is changed.
        head = {"project": None} if self.model.head is None else self.model.head.__dict__
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
        divided: as of ``Decoder``.

    Attributes:
        words: as of ``Decoder``.
    """

    def __init__(self, model: Transformer, most: int, *, divided: bool = False) -> None:
        self._model, self._most, self._divided = model, most, divided
        self.words = split_words(model) if divided else None
        self._rows: list[torch.Tensor] = []

    def prefill(self, prompts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Do as ``Decoder.prefill``."""
        self._rows = list(prompts)
        return Decoder(self._model, self._most, divided=self._divided).prefill(self._rows)

    def step(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Do as ``Decoder.step``."""
        new = tokens_R.to("cpu").split(1)
        return self.prefill([torch.cat(pair) for pair in zip(self._rows, new, strict=True)])

    def select(self, rows: torch.Tensor) -> None:
        """Do as ``Decoder.select``."""
        self._rows = [self._rows[each] for each in rows.tolist()]


def decoder_for(model: Transformer, most: int, options: Options) -> Decoder | Recomputed:
    """Return what ``options`` ask for."""
    split = split_words(model)
    divided = split is not None and not gathers(options, split)
    if options.cache:
        return Decoder(model, most, options.cache_size, divided=divided)
    return Recomputed(model, most, divided=divided)


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is; a stage of one may have no embedding."""
    return next(model.parameters()).device


def split_words(model: Any) -> VocabParallelProjection | None:
    """Return how ``tp`` divides the words; ``None``: they are whole, or of another stage."""
    project = None if model.head is None else model.head.project
    return project if isinstance(project, VocabParallelProjection) else None


def check_model(op: str, model: Any) -> None:
    """Raise unless tokens can be generated by a model, as it is spread over processes."""
    if not isinstance(model, Transformer):
        got = checks.type_name(model)
        raise TypeError(f"{op}: model must be a fusedops.models.Transformer, got {got}")
    if not model.config.causal or model.config.head != "causal":
        raise ValueError(f"{op}: model must be a decoder (causal), got an encoder")
    if model.config.domain_experts:
        raise checks.UnsupportedError(
            f"{op}: model must have no domain_experts, got {model.config.domain_experts}: of new "
            "tokens no domain is known"
        )
