"""A transformer for one device: attention, layer, model. Its ends are in ``ends.py``.

It knows no parallelism. ``parallelize`` changes it from outside: it replaces linear layers,
``Attention.core`` (how queries meet keys) and ``Head.project`` and ``Head.loss`` (how a hidden
state meets the vocabulary), and shards the parameters. What the functions are given is a sequence
with its positions, or a part of one.

Letters of shapes: B sequences, S tokens of each, H hidden size, N heads, D size of a head,
V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops import ops
from fusedops._core import checks, dtypes, philox
from fusedops.models.attention_core import Documents, attend
from fusedops.models.config import TransformerConfig
from fusedops.models.dropout_seeds import ATTENTION, FEED_FORWARD, Draws, draws
from fusedops.models.embedding_and_head import Embedding, Head
from fusedops.models.initialize import initialize
from fusedops.models.input_checks import check_inputs
from fusedops.models.layer_parts import feed_forward_of, linear, norm_of
from fusedops.models.positions import alibi_slopes, rotary_tables
from fusedops.nn import BalancingBias, MoE, RMSNorm
from fusedops.parallel.dropout import Place


class Loss(NamedTuple):
    """The parts of a loss, as sums: what shards of a batch have are added, then divided.

    Attributes:
        total: cross-entropy summed over the targets, a float32 scalar.
        num_tokens: how many targets there are, an int64 scalar.
        auxiliary: the routers' losses summed over the layers, each a mean over the tokens; a
            float32 scalar.
    """

    total: torch.Tensor
    num_tokens: torch.Tensor
    auxiliary: torch.Tensor


@dataclass(frozen=True)
class Places:
    """Where the tokens stand; made once for all layers.

    Attributes:
        rotary: cosines and sines, ``[S, D]`` or ``[B, S, D]``, or ``None``.
        documents: which tokens may attend each other, ``None``: all of a sequence.
        tokens: the ids ``[B, S]``, where experts follow from them, else ``None``.
        domains: of the tokens, ``[B, S]``, or ``None``.
        draws: what dropout draws from; ``None``: torch's generator.
    """

    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    documents: Documents | None = None
    tokens: torch.Tensor | None = None
    domains: torch.Tensor | None = None
    draws: Draws | None = None

    def seed(self, layer: int, call: int) -> torch.Tensor | None:
        """Return what dropout of a branch of a layer draws from."""
        return None if self.draws is None else self.draws.of_rows(layer, call)


class Attention(nn.Module):
    """Attention between the tokens of a sequence.

    Attributes:
        core: how queries meet keys: ``attend``, or a function that is called the same way.
        num_heads: heads of the queries in this process.
        num_kv_heads: heads of keys and values in this process.
        first_head: the number of its first head.
        head_dim: size of a head.
    """

    core: Callable[..., torch.Tensor]

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.bias
        self.config, self.index = config, index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.kv_heads
        self.first_head = 0
        self.head_dim = config.size_of_head
        self.query = linear(hidden, config.query_width, bias)
        self.key = linear(hidden, config.key_width, bias)
        self.value = linear(hidden, config.key_width, bias)
        self.output = linear(config.query_width, hidden, bias)
        eps = config.norm_eps
        self.query_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.core = attend

    def forward(
        self, x_BSH: torch.Tensor, places: Places, asking_BSH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``[B, S, H]``; queries are made of ``asking_BSH`` where it is given."""
        return self.output(self.meet(*self.split(x_BSH, places, asking_BSH), places))

    def split(
        self, x_BSH: torch.Tensor, places: Places, asking_BSH: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values by heads, ``[B, N, S, D]``, turned by their places."""
        asking_BSH = x_BSH if asking_BSH is None else asking_BSH
        query = self.query(asking_BSH).unflatten(-1, (-1, self.head_dim))
        key = self.key(x_BSH).unflatten(-1, (-1, self.head_dim))
        value = self.value(x_BSH).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query_BNSD, key_BNSD, value_BNSD = (each.transpose(1, 2) for each in (query, key, value))
        if places.rotary is not None:
            query_BNSD, key_BNSD = ops.rotary_embedding(query_BNSD, key_BNSD, *places.rotary)
        return query_BNSD, key_BNSD, value_BNSD

    def meet(
        self,
        query_BNSD: torch.Tensor,
        key_BNSD: torch.Tensor,
        value_BNSD: torch.Tensor,
        places: Places,
    ) -> torch.Tensor:
        """Return what the heads here found, ``[B, S, N * D]``."""
        config = self.config
        slopes = None
        if config.alibi:
            slopes = alibi_slopes(config.num_heads, query_BNSD.device)
            slopes = slopes[self.first_head : self.first_head + self.num_heads]
        dropout_p = config.attention_dropout if self.training else 0.0
        more = {}
        if places.draws is not None and dropout_p > 0.0:
            more["seed"] = places.draws.of_scores(self.index)
        output_BNSD = self.core(
            query_BNSD,
            key_BNSD,
            value_BNSD,
            is_causal=config.causal,
            window=None if config.sliding_window is None else (config.sliding_window - 1, 0),
            alibi_slopes=slopes,
            dropout_p=dropout_p,
            documents=places.documents,
            **more,
        )
        return output_BNSD.transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Attention and feed-forward part, each added to the residual stream.

    Attributes:
        router_loss: ``fusedops.moe_router_loss``, or a function that is called the same way.
        balancing: counts the router's choices for its bias, ``None`` where it has none.
        take_tokens: gives the router and the experts the tokens that they compute here.
        take_ids: gives those tokens' ids.
        join_tokens: gives all tokens back.
    """

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.attention_norm = norm_of(config, adds=config.post_norm)
        self.attention = Attention(config, index)
        self.feed_forward_norm = norm_of(config, adds=True)
        self.feed_forward = feed_forward_of(config, index)
        self.balancing: BalancingBias | None = None
        if config.balance_rate and config.is_sparse(index):
            rate = config.balance_rate
            self.balancing = BalancingBias(config.num_experts, rate, own_bias=False)
        self.router_loss: Callable[..., torch.Tensor] = ops.moe_router_loss
        self.take_tokens: Callable[[torch.Tensor], torch.Tensor] = _all
        self.take_ids: Callable[[torch.Tensor], torch.Tensor] = _all
        self.join_tokens: Callable[[torch.Tensor], torch.Tensor] = _all

    def forward(
        self, x_BSH: torch.Tensor, places: Places, asking_BSH: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``[B, S, H]`` and the router's loss, ``None`` where there is none.

        Args:
            x_BSH: the residual stream.
            places: of the tokens.
            asking_BSH: what queries are made of, if not of the stream.
        """
        seeds = [places.seed(self.index, call) for call in (ATTENTION, FEED_FORWARD)]
        if self.config.post_norm:
            branch_BSH = self.attention(x_BSH, places, asking_BSH)
            x_BSH, _ = self.attention_norm(branch_BSH, x_BSH, seed=seeds[0])
            branch_BSH, auxiliary = self._feed_forward(x_BSH, places)
            return self.feed_forward_norm(branch_BSH, x_BSH, seed=seeds[1])[0], auxiliary
        branch_BSH = self.attention(self.attention_norm(x_BSH), places, asking_BSH)
        normed_BSH, x_BSH = self.feed_forward_norm(branch_BSH, x_BSH, seed=seeds[0])
        branch_BSH, auxiliary = self._feed_forward(normed_BSH, places)
        dropout = self.config.dropout
        x_BSH = ops.bias_dropout_add(branch_BSH, None, x_BSH, dropout, self.training, seed=seeds[1])
        return x_BSH, auxiliary

    def _feed_forward(
        self, x_BSH: torch.Tensor, places: Places
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        part = self.feed_forward
        if not isinstance(part, MoE):
            return part(x_BSH), None
        x_BSH = self.take_tokens(x_BSH)
        logits, plan = self.choose(x_BSH, places)
        auxiliary = None if logits is None else self.loss_of_router(logits, plan)
        return self.join_tokens(part(x_BSH, plan=plan)), auxiliary

    def choose(
        self, x_BSH: torch.Tensor, places: Places
    ) -> tuple[torch.Tensor | None, ops.RoutingPlan]:
        """Return the router's logits, ``None`` where ids decide, and the experts of each token."""
        part: Any = self.feed_forward
        if part.gate is None:
            return None, self._hashed(places)
        logits, plan = part.gate(x_BSH)
        if self.balancing is not None:
            self.balancing.count(plan)
        return logits, plan

    def loss_of_router(
        self, logits: torch.Tensor, choices: ops.RoutingPlan | torch.Tensor
    ) -> torch.Tensor | None:
        """Return the losses of the router, ``None`` where the configuration has none."""
        config = self.config
        if not self.training or not (config.balance_loss or config.z_loss):
            return None
        return self.router_loss(
            logits,
            choices,
            balance=config.balance_loss,
            z=config.z_loss,
            score=config.router_score,
        )

    def _hashed(self, places: Places) -> ops.RoutingPlan:
        """Return the experts of each token by its id; a hash of their own in each layer."""
        config, domains = self.config, places.domains
        assert places.tokens is not None
        return ops.hash_route(
            self.take_ids(places.tokens).flatten(),
            config.num_experts,
            top_k=config.top_k,
            seed=config.router_seed + self.index,
            domains=None if domains is None else self.take_ids(domains).flatten(),
            domain_experts=config.domain_experts or None,
        )


def _all(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Transformer(nn.Module):
    """A decoder, or an encoder, of any of the kinds that ``TransformerConfig`` describes.

    Args:
        config: sizes and choices.
        device: of the parameters; ``"meta"``: they have no values, ``initialize`` gives them some.
        dtype: of the parameters.

    Raises:
        UnsupportedError: the configuration has an encoder beside the decoder, or relative
            positions.
        TypeError: ``config`` is no ``TransformerConfig``.

    Note:
        New weights are drawn by a seed from torch's generator, ``torch.manual_seed`` reproduces
        them. The parameters' names are the same for every kind of model and every layout.

    Example:
        >>> import torch, fusedops
        >>> from fusedops.models import Transformer, preset
        >>> model = Transformer(preset("tiny-llama"))
        >>> tokens = torch.arange(8).reshape(1, 8)
        >>> model(tokens).shape
        torch.Size([1, 8, 256])
        >>> loss = model(tokens, labels=tokens)
        >>> int(loss.num_tokens)
        8
    """

    # Which part of a batch and of the heads this process has: for dropout.
    place = Place()

    def __init__(
        self,
        config: TransformerConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(config)
        self.config = config
        place = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):
            self.embedding = Embedding(config)
            layers = {str(each): Layer(config, each) for each in range(config.num_layers)}
            self.layers = nn.ModuleDict(layers)
            self.norm: nn.Module = nn.Identity() if config.post_norm else norm_of(config)
            asks = nn.Embedding(config.seq_len, config.hidden_size) if config.query_layer else None
            self.query_positions = asks
            self.head = Head(config)
        if dtype is not None:
            self.to(dtype)
        if place.type != "meta":
            self.to_empty(device=place)
            initialize(self)

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        domains: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
        first_sequence: int | None = None,
    ) -> Any:
        """Return logits, or with labels the loss.

        Args:
            tokens: ``[B, S]`` int64.
            labels: ``[B, S]`` int64: the target of each position (already shifted); -100 has none.
            positions: ``[S]`` or ``[B, S]`` int64: where the tokens stand in their sequence; from 0
                on by default.
            document_ids: ``[B, S]``: tokens attend only those of their own document, which is a run
                of equal numbers; padding is a document of its own.
            token_types: ``[B, S]`` int64: BERT's segments; 0 by default.
            domains: ``[B, S]`` int64: the domain of each token, with ``domain_experts``.
            seed: what dropout draws from, int64 ``[2]``, the same on all processes; by default two
                numbers of torch's generator.
            first_sequence: how many sequences of the batch that ``seed`` is for come before these;
                by default those of processes before this one.

        Returns:
            Logits ``[B, S, V]``, or a ``Loss``.

        Raises:
            ValueError: a shape does not fit, a sequence is longer than the table of positions, or
                (CPU) a token is no word of the vocabulary or a position is not in the table.
            TypeError: an argument is no int64 tensor.
        """
        if len(self.layers) < self.config.num_layers:
            raise checks.UnsupportedError(
                f"Transformer: this process has {len(self.layers)} of the "
                f"{self.config.num_layers} layers: call step or forward of the TrainEngine"
            )
        check_inputs(self.config, tokens, labels, positions, document_ids, token_types, domains)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        drawn = self.draws(tokens.shape, tokens.device, seed, first_sequence)
        first = None if drawn is None else drawn.of_embedding()
        x_BSH = self.embedding(tokens, positions, token_types, seed=first)
        x_BSH, auxiliary = self.through(x_BSH, positions, document_ids, tokens, domains, drawn)
        found = self.leave(x_BSH, labels)
        return found if labels is None else Loss(found, (labels != -100).sum(), auxiliary)

    def through(
        self,
        x_BSH: torch.Tensor,
        positions: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        domains: torch.Tensor | None = None,
        drawn: Draws | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states behind the layers that there are, and their routers' losses."""
        places = self._places(x_BSH, positions, document_ids, tokens, domains, drawn)
        auxiliary = torch.zeros((), device=x_BSH.device)
        for name, layer in self.layers.items():
            asking_BSH = None
            if self.query_positions is not None and name == str(self.config.num_layers - 1):
                x_BSH = self.norm(x_BSH)
                asking_BSH = self.query_positions(positions).expand_as(x_BSH)
            x_BSH, extra = layer(x_BSH, places, asking_BSH)
            auxiliary = auxiliary if extra is None else auxiliary + extra
        return x_BSH, auxiliary

    def leave(self, x_BSH: torch.Tensor, labels_BS: torch.Tensor | None) -> torch.Tensor:
        """Return logits, or with labels the sum of the targets' losses."""
        if self.query_positions is None:
            x_BSH = self.norm(x_BSH)
        weight = self.embedding.tokens.weight if self.config.tied else None
        return self.head(x_BSH, labels_BS, weight=weight)

    def draws(
        self,
        shape: Any,
        device: torch.device,
        seed: torch.Tensor | None = None,
        first: int | None = None,
    ) -> Draws | None:
        """Return what dropout of a forward draws from, ``None`` where nothing is dropped.

        Args:
            shape: of the tokens here, ``[B, S]``.
            device: of the hidden states.
            seed: as of ``forward``.
            first: ``first_sequence`` of ``forward``.
        """
        config = self.config
        if not self.training or not (config.dropout or config.attention_dropout):
            return None
        seed = philox.new_seed(device) if seed is None else seed
        sizes = {"heads": config.num_heads, "features": config.hidden_size}
        return draws(seed, config.num_layers, self.place, shape, first=first, **sizes)

    def _places(
        self,
        x_BSH: torch.Tensor,
        positions: torch.Tensor,
        document_ids: torch.Tensor | None,
        tokens: torch.Tensor | None = None,
        domains: torch.Tensor | None = None,
        drawn: Draws | None = None,
    ) -> Places:
        config = self.config
        rotary = None
        if config.rotary:
            dtype = dtypes.statistics_dtype(x_BSH.dtype)
            width, theta, scaling = config.size_of_head, config.rope_theta, config.rope_scaling
            rotary = rotary_tables(positions, width, theta, scaling, dtype)
        documents = None if document_ids is None else Documents(document_ids)
        if config.router != "hash":
            tokens = domains = None
        return Places(rotary, documents, tokens, domains, drawn)


def _check(config: TransformerConfig) -> None:
    if not isinstance(config, TransformerConfig):
        got = checks.type_name(config)
        raise TypeError(f"Transformer: config must be a TransformerConfig, got {got}")
    for name in ("encoder_layers", "relative_buckets"):
        if getattr(config, name):
            raise checks.UnsupportedError(
                f"Transformer: {name} must be 0, got {getattr(config, name)}: there is no encoder "
                "beside a decoder here, and there are no relative positions"
            )
