"""A transformer for one device: ``Layer``, ``Transformer``.

Start with ``Transformer.forward``. It makes a ``ForwardContext``, which has all that the layers
need in addition to hidden states (rotary tables, documents, dropout seeds, a KV cache), and runs
embedding, layers, norm and head. Attention is in ``attention.py``, the other parts of a layer in
``parts.py``.

The model contains no communication. ``parallelize`` replaces linear layers and the head by parallel
ones, shards the parameters, and sets ``Transformer.partition``, by which a layer asks for this
process's part of the tokens.

Letters of shapes: B sequences, S tokens of each, H hidden size, N heads, D size of a head, V size
of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops import ops
from fusedops._core import checks, dtypes
from fusedops._core.labels import IGNORE_INDEX
from fusedops.models.attention import Attention, LatentAttention
from fusedops.models.attention_core import Documents, rotary_tables
from fusedops.models.config import TransformerConfig
from fusedops.models.forward_context import (
    ATTENTION,
    FEED_FORWARD,
    BatchPartition,
    ForwardContext,
)
from fusedops.models.initialize import initialize
from fusedops.models.inputs import check_inputs
from fusedops.models.parts import Embedding, Head, feed_forward_of, norm_of
from fusedops.nn import BalancingBias, GatedMLP, LinearAct, MoE, QuantizedLinear


class Loss(NamedTuple):
    """The parts of a loss; callers add the first two over micro-batches, and average the third.

    Attributes:
        total: cross-entropy summed over the targets, a float32 scalar.
        num_tokens: how many targets there are, an int64 scalar; ``total`` is divided by it.
        auxiliary: the sum over the layers of the routers' losses, each a mean over the tokens, a
            float32 scalar.
    """

    total: torch.Tensor
    num_tokens: torch.Tensor
    auxiliary: torch.Tensor


class Layer(nn.Module):
    """Attention and feed-forward part, each added to the residual stream.

    ``x += attention(norm(x))``, then ``x += feed_forward(norm(x))``; with ``post_norm`` (BERT) the
    sums are normalised instead. A sum and the norm after it are one operator (``adds``).

    Attributes:
        balancing: counts the router's choices for its bias, ``None`` where it has none.
    """

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.attention_norm = norm_of(config, adds=config.post_norm)
        attention = LatentAttention if config.is_latent else Attention
        self.attention = attention(config, index)
        self.feed_forward_norm = norm_of(config, adds=True)
        self.feed_forward = feed_forward_of(config, index)
        self.balancing: BalancingBias | None = None
        if config.balance_rate and config.is_sparse(index):
            rate = config.balance_rate
            self.balancing = BalancingBias(config.num_experts, rate, own_bias=False)

    def forward(
        self,
        x_BSH: torch.Tensor,
        context: ForwardContext,
        query_input_BSH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``[B, S, H]`` and the router's auxiliary loss, ``None`` where there is none."""
        branch_BSH = self.attention(self.attention_input(x_BSH), context, query_input_BSH)
        x_BSH, residual_BSH = self.feed_forward_input(branch_BSH, x_BSH, context)
        if isinstance(self.feed_forward, MoE):
            branch_BSH, auxiliary = self._experts(self.feed_forward, x_BSH, context)
        else:
            branch_BSH, auxiliary = self.feed_forward(x_BSH), None
        return self.add_feed_forward(branch_BSH, residual_BSH, context), auxiliary

    def attention_input(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the input of attention, from the residual stream."""
        return x_BSH if self.config.post_norm else self.attention_norm(x_BSH)

    def feed_forward_input(
        self, branch_BSH: torch.Tensor, x_BSH: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the output of attention; return the input of the feed-forward part and the stream."""
        seed = context.branch_seed(self.index, ATTENTION)
        if self.config.post_norm:
            x_BSH, _ = self.attention_norm(branch_BSH, x_BSH, seed=seed)
            return x_BSH, x_BSH
        return self.feed_forward_norm(branch_BSH, x_BSH, seed=seed)

    def add_feed_forward(
        self, branch_BSH: torch.Tensor, residual_BSH: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Add the output of the feed-forward part; return the residual stream."""
        config, seed = self.config, context.branch_seed(self.index, FEED_FORWARD)
        if config.post_norm:
            return self.feed_forward_norm(branch_BSH, residual_BSH, seed=seed)[0]
        return ops.bias_dropout_add(
            branch_BSH, None, residual_BSH, config.dropout, self.training, seed=seed
        )

    def _experts(
        self, moe: MoE, x_BSH: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_BSH = context.partition.shard_tokens(x_BSH)
        logits, plan = self.route(x_BSH, context)
        auxiliary = None if logits is None else self.auxiliary_loss(logits, plan, context)
        return context.partition.gather_tokens(moe(x_BSH, plan=plan)), auxiliary

    def route(
        self, x_BSH: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor | None, ops.RoutingPlan]:
        """Return the router's logits, ``None`` of a hash router, and the experts of each token."""
        moe: Any = self.feed_forward
        if moe.gate is None:
            return None, self._hash_plan(context)
        logits, plan = moe.gate(x_BSH, dropless=context.dropless)
        if self.balancing is not None:
            self.balancing.count(plan)
        return logits, plan

    def auxiliary_loss(
        self,
        logits: torch.Tensor,
        choices: ops.RoutingPlan | torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor | None:
        """Return the router's losses, ``None`` where the configuration has none."""
        config = self.config
        if not self.training or not (config.balance_loss or config.z_loss):
            return None
        return ops.moe_router_loss(
            logits,
            choices,
            balance=config.balance_loss,
            z=config.z_loss,
            score=config.router_score,
            group=context.partition.router_group,
        )

    def _hash_plan(self, context: ForwardContext) -> ops.RoutingPlan:
        """Return the experts of each token by its id, with another hash in each layer."""
        config, domains, shard = self.config, context.domains, context.partition.shard_ids
        assert context.tokens is not None
        return ops.hash_route(
            shard(context.tokens).flatten(),
            config.num_experts,
            top_k=config.top_k,
            seed=config.router_seed + self.index,
            domains=None if domains is None else shard(domains).flatten(),
            domain_experts=config.domain_experts or None,
        )


class TransformerLayers(nn.ModuleDict):
    """The layers of a model, or of a pipeline stage, by their indices as names."""

    def forward(
        self,
        x_BSH: torch.Tensor,
        context: ForwardContext,
        norm: nn.Module | None = None,
        query_positions: nn.Embedding | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states after the layers, and the sum of their auxiliary losses.

        In a model with a query layer (PanGu), the last layer computes its queries from the table
        ``query_positions``, and ``norm`` is applied to its input.
        """
        auxiliary = torch.zeros((), device=x_BSH.device)
        layer: Any
        for layer in self.values():
            query_input_BSH = None
            if query_positions is not None and layer.index == layer.config.num_layers - 1:
                assert norm is not None
                x_BSH = norm(x_BSH)
                query_input_BSH = query_positions(context.positions).expand_as(x_BSH)
            x_BSH, extra = layer(x_BSH, context, query_input_BSH)
            auxiliary = auxiliary if extra is None else auxiliary + extra
        return x_BSH, auxiliary


class Transformer(nn.Module):
    """A decoder, or an encoder, of any of the kinds that ``TransformerConfig`` describes.

    Args:
        config: sizes and choices.
        device: of the parameters; ``"meta"``: they have no values, ``initialize`` gives them some.
        dtype: of the parameters.

    Raises:
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

    def __init__(
        self,
        config: TransformerConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, TransformerConfig):
            checks.fail_type("Transformer", "config", "a TransformerConfig", config)
        self.config = config
        self.partition = BatchPartition()  # all of a batch
        target = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):
            self.embedding = Embedding(config)
            layers = {str(index): Layer(config, index) for index in range(config.num_layers)}
            self.layers = TransformerLayers(layers)
            self.norm: nn.Module = nn.Identity() if config.post_norm else norm_of(config)
            self.query_positions: nn.Embedding | None = None
            if config.query_layer:
                self.query_positions = nn.Embedding(config.seq_len, config.hidden_size)
            self.head = Head(config)
        if dtype is not None:
            self.to(dtype)
        if target.type != "meta":
            self.to_empty(device=target)
            initialize(self)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, **inputs: Any
    ) -> Any:
        """Return logits, or with labels the loss.

        Args:
            tokens: ``[B, S]`` int64.
            labels: ``[B, S]`` int64: the target of each position (already shifted); -100 has none.
            **inputs: arguments of ``make_context``: ``positions``, ``document_ids``,
                ``token_types``, ``domains``, ``seed``, ``first_sequence``, ``attend`` and others.

        Returns:
            Logits ``[B, S, V]``, or a ``Loss``.

        Raises:
            ValueError: a shape does not fit, a sequence is longer than the table of positions, or
                (CPU) a token is not in the vocabulary or a position is not in the table.
            TypeError: an argument is no int64 tensor, or an input is unknown.
            UnsupportedError: the model is a stage of a pipeline.
        """
        if len(self.layers) < self.config.num_layers:
            raise checks.UnsupportedError(
                f"Transformer: this process has {len(self.layers)} of the "
                f"{self.config.num_layers} layers: call step or forward of the TrainEngine"
            )
        check_inputs(self.config, tokens, {"labels": labels, **inputs})
        return self.compute(tokens, labels, **inputs)

    def compute(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, **inputs: Any
    ) -> Any:
        """Return what ``forward`` does, for tensors that ``check_inputs`` has checked."""
        context = self.make_context(tokens, **inputs)
        x_BSH = self.embedding(tokens, context)
        x_BSH, auxiliary = self.layers(x_BSH, context, self.norm, self.query_positions)
        output = self.output(x_BSH, labels, context)
        if labels is None:
            return output
        return Loss(output, (labels != IGNORE_INDEX).sum(), auxiliary)

    def join_projections(self) -> None:
        """Make one linear layer of those that have the same input, in each layer.

        Decoding then calls fewer operators for a token. The layers have other names in
        ``state_dict``, and the model can be neither parallelized nor saved for Hugging Face. A
        model with a query layer, whose queries have an input of their own, stays.
        """
        if self.config.query_layer:
            return
        for layer in self.layers.values():
            assert isinstance(layer, Layer)
            layer.attention.join_projections()
            if isinstance(layer.feed_forward, GatedMLP) and not self.config.bias:
                layer.feed_forward.join_projections()

    def quantize_head(self, format: str, group: int) -> tuple[torch.Tensor, QuantizedLinear]:
        """Quantise the projection on the vocabulary; a tied embedding keeps its own weight.

        Args:
            format: of ``fusedops.nn.QuantizedLinear``.
            group: inputs that share a scale.

        Returns:
            The weight before, and the quantised projection.
        """
        head = self.head
        weight: Any = self.embedding.tokens.weight if self.config.tied else head.weight
        linear = LinearAct(weight.shape[1], weight.shape[0], False, "meta")
        linear.weight, linear.bias = weight, head.bias
        head.quantized = QuantizedLinear.of(linear, format=format, group=group)
        head.weight = None
        return weight, head.quantized

    def make_context(
        self,
        tokens: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        domains: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
        first_sequence: int | None = None,
        **options: Any,
    ) -> ForwardContext:
        """Return what all layers of a forward of these tokens need.

        Args:
            tokens: ``[B, S]`` int64.
            positions: ``[S]`` or ``[B, S]`` int64: of the tokens in their sequence; from 0 on by
                default.
            document_ids: ``[B, S]``: tokens attend only those of their own document, which is a run
                of equal numbers; padding is a document of its own.
            token_types: ``[B, S]`` int64: BERT's segments; 0 by default.
            domains: ``[B, S]`` int64: the domain of each token, with ``domain_experts``.
            seed: of dropout, int64 ``[2]``, the same on all processes; by default two numbers of
                the generator of the first process of the stage.
            first_sequence: number of sequences before these in the batch that ``seed`` is for; by
                default those of the data parallel ranks before this one.
            **options: other fields of ``ForwardContext``: ``attend``, ``kv_cache``,
                ``logits_to_keep``, ``gather_logits``, ``dropless``.
        """
        config = self.config
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotary = None
        if config.rotary:
            dtype = dtypes.statistics_dtype(next(self.layers.parameters()).dtype)
            rotary = rotary_tables(positions, config, dtype)
        seeds = None
        if self.training and (config.dropout or config.attention_dropout):
            seed = self.partition.new_seed(tokens.device) if seed is None else seed
            seeds = self.partition.dropout_seeds(seed, tokens.shape, first_sequence, config)
        needs_ids = config.router == "hash"
        return ForwardContext(
            positions=positions,
            rotary=rotary,
            documents=None if document_ids is None else Documents(document_ids),
            token_types=token_types,
            tokens=tokens if needs_ids else None,
            domains=domains if needs_ids else None,
            dropout_seeds=seeds,
            partition=self.partition,
            **options,
        )

    def output(
        self, x_BSH: torch.Tensor, labels_BS: torch.Tensor | None, context: ForwardContext
    ) -> torch.Tensor:
        """Return logits, or with labels the sum of the targets' losses."""
        if self.query_positions is None:
            x_BSH = self.norm(x_BSH)
        weight = self.embedding.tokens.weight if self.config.tied else None
        return self.head(x_BSH, labels_BS, context, weight)
