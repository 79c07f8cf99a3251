"""What a transformer is: its sizes and its choices, and how many parameters it has.

Nothing here builds a model; ``transformer.py`` does. Counts are exact: the tests compare them with
published ones and with the modules that transformers builds. Weights are counted by what tensor
parallelism does with them: it divides ``split`` ones (columns, rows or the vocabulary), and each
rank has all ``replicated`` ones (norms, biases that are added after the sum, routers). Experts are
counted separately: tensor parallelism does not divide them, and they have their own data-parallel
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from fusedops._core import checks
from fusedops.models.rotary import KINDS, RopeScaling
from fusedops.ops.hash_route import check_domain_experts
from fusedops.ops.moe_route import check_options

# transformers computes ``gelu_new`` from seven operations; the other activations are one each.
ACTIVATIONS = ("gelu", "gelu_new", "gelu_tanh", "fast_gelu", "relu", "silu")
_SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "seq_len")
_LATENT_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OPTIONAL_SIZES = (
    *("num_kv_heads", "head_dim", "sliding_window", "expert_size", "q_lora_rank", "kv_lora_rank"),
    *_LATENT_SIZES,
)
_COUNTS = (
    *("position_tables", "token_types", "num_experts", "moe_layers", "shared_size"),
    "dense_layers",
)
_POSITIVE = ("rope_theta", "norm_eps", "router_scaling", "capacity_factor")
_FACTORS = ("balance_loss", "z_loss", "balance_rate", "initializer_range")
_RULES: dict[str, checks.Rule] = {
    **dict.fromkeys((*_SIZES, *_OPTIONAL_SIZES, "top_k"), partial(checks.integer, least=1)),
    **dict.fromkeys((*_COUNTS, "router_seed", "pad_token_id"), partial(checks.integer, least=0)),
    **dict.fromkeys(("dropout", "attention_dropout"), checks.probability),
    **dict.fromkeys(_POSITIVE, checks.positive),
    **dict.fromkeys(_FACTORS, partial(checks.finite, least=0)),
    "norm": partial(checks.choice, choices=("layer", "rms")),
    "head": partial(checks.choice, choices=("causal", "masked")),
    "activation": partial(checks.choice, choices=ACTIVATIONS),
    "router": partial(checks.choice, choices=("learned", "hash")),
    "router_score": partial(checks.choice, choices=("softmax", "sigmoid")),
}
# What has a meaning with a learned router alone.
_LOGIT_OPTIONS = ("router_score", "router_scaling", "num_groups", "capacity_factor")
_LOGIT_LOSSES = ("balance_loss", "z_loss", "balance_rate")


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters."""

    split: int = 0  # those that tensor parallelism divides
    replicated: int = 0  # those that each of its ranks has
    experts: int = 0  # those of experts, which tensor parallelism does not divide

    def __add__(self, other: Weights) -> Weights:
        split, experts = self.split + other.split, self.experts + other.experts
        return Weights(split, self.replicated + other.replicated, experts)

    def __mul__(self, factor: int) -> Weights:
        return Weights(self.split * factor, self.replicated * factor, self.experts * factor)

    @property
    def total(self) -> int:
        """All of them."""
        return self.split + self.replicated + self.experts


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes and choices of a transformer.

    Attributes:
        hidden_size: width of the residual stream.
        num_layers: layers of the decoder or encoder.
        num_heads: of the queries.
        intermediate_size: width between the two products of a feed-forward layer, or of an expert.
        vocab_size: rows of the embedding.
        seq_len: tokens of a sequence; rows of a learned table of positions.
        num_kv_heads: heads of keys and values; as many as of queries by default.
        head_dim: ``hidden_size / num_heads`` by default.
        position_tables: learned tables of positions, ``[seq_len, hidden_size]`` each (PanGu's query
            layer has one of its own); 0: rotary positions or ALiBi.
        rotary: whether queries and keys are rotated.
        token_types: rows of BERT's table of segments.
        norm: ``"layer"`` (weight and bias) or ``"rms"`` (weight).
        post_norm: whether norms follow the residual sums, as in BERT.
        gated: whether the feed-forward layer has a gate.
        activation: one of ``ACTIVATIONS``.
        bias: whether linear layers have biases.
        qk_norm: whether queries and keys are normalised by head.
        tied: whether the head's weight is the embedding's.
        head: ``"causal"``: a linear layer; ``"masked"``: BERT's, with a layer before it.
        kv_lora_rank: width of the latent of which latent attention (DeepSeek-V2 and V3,
            arXiv:2405.04434) makes keys and values; ``None``: attention is the usual one. With it
            ``bias`` gives biases to the projections from and to the residual stream alone.
        q_lora_rank: with ``kv_lora_rank``: width of the latent of which queries are made; ``None``:
            they are made of the hidden states.
        qk_nope_head_dim: with ``kv_lora_rank``: elements of a head of queries and keys that are not
            rotated.
        qk_rope_head_dim: those behind them, which are rotated; all heads of keys share theirs.
        v_head_dim: elements of a head of values.
        num_experts: experts of a sparse layer; 0: the model is dense.
        top_k: experts that a token goes to.
        moe_layers: how many layers have experts, evenly spread; all by default.
        dense_layers: first layers without experts; all after them have some (DeepSeek-V3). 0:
            ``moe_layers`` are spread.
        expert_size: width of an expert; ``intermediate_size`` by default.
        causal: whether a token attends only itself and what is before it.
        alibi: whether distances are subtracted from the scores (arXiv:2108.12409).
        rope_theta: base of the rotations' wave lengths.
        rope_scaling: how they are stretched, ``None`` for not.
        sliding_window: tokens that a token attends, itself and those right before it; ``None``:
            all.
        query_layer: whether the last layer's queries are made of a second table of positions
            instead of the hidden states (PanGu, arXiv:2104.12369); it follows the final norm.
        norm_eps: added to the variance, or to the mean square.
        dropout: probability with which elements of the embedding's and of each branch's output are
            dropped in training.
        attention_dropout: the same, of attention's weights.
        shared_size: width of the expert that every token visits; 0: there is none. Several are one
            of their widths together.
        shared_gate: whether a sigmoid of the token weighs it, as in Qwen2-MoE.
        router: ``"learned"``: by logits; ``"hash"``: by the token's id (``fusedops.hash_route``),
            another hash in each layer: nothing is learned and every expert weighs ``1 / top_k``.
        router_seed: of the hash.
        domain_experts: with ``"hash"``: how many experts each domain has, the first domain's first
            (random routed experts, PanGu-Sigma, arXiv:2303.10845). Empty: tokens share all.
        router_score: ``"softmax"`` or ``"sigmoid"``, of ``fusedops.moe_route``.
        router_normalize: whether the weights of a token's experts add up to 1.
        router_scaling: factor of these weights.
        num_groups: groups of experts of which a token chooses from ``topk_groups``, as in
            DeepSeek-V3; ``None``: no groups.
        topk_groups: how many of them.
        group_score: what ranks groups: ``"max"`` or ``"top2_sum"``.
        capacity_factor: of the rows that an expert takes; ``None``: all that come.
        drop_policy: which are dropped beyond it, as in ``fusedops.moe_route``.
        balance_loss: factor of the routers' balance loss (1.0 times it where routing is uniform).
        z_loss: factor of the mean square of the routers' log-sum-exp.
        balance_rate: step of the bias that balances without a loss (arXiv:2408.15664): once per
            optimizer step, by ``TrainEngine.balance``; 0: there is no bias.
        initializer_range: standard deviation of new weights.
        pad_token_id: row of the embedding that starts as zeros and gets no gradient from the
            lookup (``padding_idx`` of ``torch.nn.Embedding``); a tied head still gives it one.

    Raises:
        ValueError: a size is not positive, or does not divide another, or two choices exclude each
            other.
        TypeError: a size is no integer, a choice no bool, a factor no number.

    Example:
        >>> from fusedops.models import TransformerConfig
        >>> sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
        >>> config = TransformerConfig(**sizes, intermediate_size=256, seq_len=128, rotary=True)
        >>> config.parameters().total
        132864
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    seq_len: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    position_tables: int = 0
    rotary: bool = False
    token_types: int = 0
    norm: str = "layer"
    post_norm: bool = False
    gated: bool = False
    activation: str = "gelu"
    bias: bool = True
    qk_norm: bool = False
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    tied: bool = True
    head: str = "causal"
    num_experts: int = 0
    top_k: int = 1
    moe_layers: int | None = None
    dense_layers: int = 0
    expert_size: int | None = None
    causal: bool = True
    alibi: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    query_layer: bool = False
    norm_eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    shared_size: int = 0
    shared_gate: bool = False
    router: str = "learned"
    router_seed: int = 0
    domain_experts: tuple[int, ...] = ()
    router_score: str = "softmax"
    router_normalize: bool = True
    router_scaling: float = 1.0
    num_groups: int | None = None
    topk_groups: int | None = None
    group_score: str = "max"
    capacity_factor: float | None = None
    drop_policy: str = "position"
    balance_loss: float = 0.0
    z_loss: float = 0.0
    balance_rate: float = 0.0
    initializer_range: float = 0.02
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        name = "TransformerConfig"
        checks.fields(name, self, _RULES)
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            checks.fail_type(name, "rope_scaling", "None or a RopeScaling", self.rope_scaling)
        for is_wrong, argument, expected in (*self._latent_relations(), *self._relations()):
            if is_wrong:
                checks.fail(name, argument, expected, getattr(self, argument))
        if self.rotary and self.rotary_dim % 2:
            field = "qk_rope_head_dim" if self.is_latent else "head_dim"
            checks.fail(name, field, "even, to be rotated", self.rotary_dim)
        if self.domain_experts:
            sizes = self.domain_experts, self.num_experts, self.top_k
            object.__setattr__(self, "domain_experts", check_domain_experts(name, *sizes))
        shared = ("num_groups", "topk_groups", "group_score", "capacity_factor", "drop_policy")
        options = {option: getattr(self, option) for option in shared}
        top_k = self.top_k if self.num_experts else 1
        check_options(name, max(1, self.num_experts), top_k, **options)

    def _relations(self) -> Iterator[tuple[bool, str, str]]:
        """Yield whether a relation of two fields is violated, the field, and what it must be."""
        undivided = self.head_dim is None and self.hidden_size % self.num_heads != 0
        divisor = f"a divisor of hidden_size {self.hidden_size}, or head_dim given"
        yield undivided and not self.is_latent, "num_heads", divisor
        divisor = f"a divisor of num_heads {self.num_heads}"
        yield self.num_heads % self.kv_heads != 0, "num_kv_heads", divisor
        too_many = 0 < self.num_experts < self.top_k
        yield too_many, "top_k", f"at most num_experts {self.num_experts}"
        too_many = (self.moe_layers or 0) > self.num_layers
        yield too_many, "moe_layers", f"at most {self.num_layers}, the layers"
        expected = "0 without num_experts, and less than num_layers with them"
        limit = self.num_layers - 1 if self.num_experts else 0
        yield self.dense_layers > limit, "dense_layers", expected
        rest = self.num_layers - self.dense_layers
        is_other = bool(self.dense_layers) and self.moe_layers not in (None, rest)
        yield is_other, "moe_layers", f"None or {rest} with dense_layers {self.dense_layers}"
        has_none = self.expert_size is not None and not self.num_experts
        yield has_none, "expert_size", "None without num_experts"
        has_window = self.sliding_window is not None
        yield has_window and not self.causal, "sliding_window", "None unless causal"
        too_large = (self.pad_token_id or 0) >= self.vocab_size
        yield too_large, "pad_token_id", f"less than vocab_size, {self.vocab_size}"
        yield self.rotary and self.alibi, "alibi", "False with rotary"
        tables = (0, 2) if self.query_layer else (0, 1)
        misses = self.position_tables not in tables or self.query_layer > self.position_tables
        numbers = "2 with query_layer" if self.query_layer else "0 or 1 without query_layer"
        yield misses, "position_tables", numbers
        shared, is_hash = self.shared_size > 0, self.router == "hash"
        yield self.shared_gate and not shared, "shared_gate", "False without shared_size"
        yield shared and not self.num_experts, "shared_size", "0 without num_experts"
        for option in (*_LOGIT_OPTIONS, *_LOGIT_LOSSES):
            unset = getattr(type(self), option)
            is_set = is_hash and getattr(self, option) != unset
            yield is_set, option, f"{unset} with router 'hash', which has no logits"
        yield bool(self.domain_experts) and not is_hash, "router", "'hash' with domain_experts"

    def _latent_relations(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the same of latent attention and of the rotations."""
        for name in ("q_lora_rank", *_LATENT_SIZES) if not self.is_latent else ():
            yield getattr(self, name) is not None, name, "None without kv_lora_rank"
        for name in _LATENT_SIZES if self.is_latent else ():
            yield getattr(self, name) is None, name, "a size with kv_lora_rank"
        if self.is_latent:
            yield not self.rotary, "rotary", "True with kv_lora_rank"
            for name in ("qk_norm", "query_layer"):
                yield getattr(self, name), name, "False with kv_lora_rank"
            sizes = self.num_heads, self.size_of_head
            heads = f"None or {self.num_heads}, the heads of queries, with kv_lora_rank"
            yield self.num_kv_heads not in (None, sizes[0]), "num_kv_heads", heads
            size = f"None or {sizes[1]}, qk_nope_head_dim and qk_rope_head_dim together"
            yield self.head_dim not in (None, sizes[1]), "head_dim", size
        scaling = self.rope_scaling
        if scaling is None:
            return
        pairs = self.rotary_dim // 2
        lengths = {len(scaling.short_factors), len(scaling.long_factors)}
        is_uneven = scaling.kind == "longrope" and lengths != {pairs}
        yield is_uneven, "rope_scaling", f"of {pairs} short and {pairs} long factors"
        is_narrow = scaling.kind == "dynamic" and pairs < 2
        yield is_narrow, "rope_scaling", "of another kind than 'dynamic' for one pair of elements"

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are made of a latent."""
        return self.kv_lora_rank is not None

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def size_of_head(self) -> int:
        """Width of a head of queries and keys."""
        if self.is_latent:
            return (self.qk_nope_head_dim or 0) + self.rotary_dim
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated, if any are."""
        return (self.qk_rope_head_dim or 0) if self.is_latent else self.size_of_head

    @property
    def value_size(self) -> int:
        """Width of a head of values."""
        return (self.v_head_dim or 0) if self.is_latent else self.size_of_head

    @property
    def attention_scale(self) -> float | None:
        """The factor of the scores; ``None``: ``size_of_head ** -0.5``."""
        if not self.is_latent or self.rope_scaling is None:
            return None
        factor = self.rope_scaling.score_factor
        return None if factor == 1 else self.size_of_head**-0.5 * factor

    @property
    def expert_width(self) -> int:
        """Width of an expert."""
        return self.intermediate_size if self.expert_size is None else self.expert_size

    @property
    def query_width(self) -> int:
        """Width of all heads of the queries."""
        return self.num_heads * self.size_of_head

    @property
    def key_width(self) -> int:
        """Width of all heads of the keys."""
        return self.kv_heads * self.size_of_head

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        if not self.num_experts:
            return 0
        rest = self.num_layers - self.dense_layers
        return rest if self.moe_layers is None else self.moe_layers

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts: those that do are spread evenly, the last one among them."""
        if self.dense_layers:
            return layer >= self.dense_layers
        count, layers = self.sparse_layers, self.num_layers
        return (layer + 1) * count // layers > layer * count // layers

    def kinds(self, layers: Iterable[int]) -> dict[int, int]:
        """Return one layer of each kind among these, and how many are of it."""
        kinds: dict[bool, list[int]] = {}
        for index in layers:
            kinds.setdefault(self.is_sparse(index), []).append(index)
        return {alike[0]: len(alike) for alike in kinds.values()}

    def used_weights(self, index: int) -> float:
        """Return how many weights of a layer multiply a token, which ``top_k`` experts get."""
        used: float = self.layer(index).total
        if self.is_sparse(index):
            experts = self.feed_forward(index).experts
            used -= experts * (self.num_experts - self.top_k) / self.num_experts
        return used

    def layer(self, index: int) -> Weights:
        """Return the parameters of a layer."""
        return self._attention() + self._norm() * 2 + self.feed_forward(index)

    def feed_forward(self, index: int) -> Weights:
        """Return the parameters of a layer's feed-forward part, router included."""
        return self._experts() if self.is_sparse(index) else self._feed_forward()

    def embedding(self) -> Weights:
        """Return the parameters before the first layer."""
        tables = self.position_tables * self.seq_len + self.token_types
        first = self._norm() if self.post_norm else Weights()
        words = self.vocab_size * self.hidden_size
        return Weights(split=words, replicated=tables * self.hidden_size) + first

    def output(self, *, own_weight: bool | None = None) -> Weights:
        """Return the parameters after the last layer.

        Args:
            own_weight: whether the projection on the vocabulary counts; unless it is tied.
        """
        h, vocabulary = self.hidden_size, self.vocab_size
        counts = not self.tied if own_weight is None else own_weight
        weights = Weights(split=vocabulary * h if counts else 0)
        if not self.post_norm:
            weights += self._norm()
        if self.head == "masked":
            weights += Weights(split=vocabulary, replicated=h * h + h) + self._norm()
        return weights

    def parameters(self) -> Weights:
        """Return all parameters.

        Example:
            >>> from fusedops.models import preset
            >>> preset("gpt2").parameters().total
            124439808
        """
        return self.layers() + self.embedding() + self.output()

    def layers(self) -> Weights:
        """Return the parameters of all layers, without embeddings and head."""
        kinds = self.kinds(range(self.num_layers))
        return sum((self.layer(index) * count for index, count in kinds.items()), Weights())

    def _attention(self) -> Weights:
        if self.is_latent:
            return self._latent_attention()
        h, query, key = self.hidden_size, self.query_width, self.key_width
        split = 2 * h * query + 2 * h * key
        replicated = 2 * self.size_of_head if self.qk_norm else 0
        if self.bias:
            split, replicated = split + query + 2 * key, replicated + h
        return Weights(split=split, replicated=replicated)

    def _latent_attention(self) -> Weights:
        h, queries, values = self.hidden_size, self.query_width, self.num_heads * self.value_size
        rank, query_rank = self.kv_lora_rank or 0, self.q_lora_rank
        nope = self.num_heads * (self.qk_nope_head_dim or 0)
        split = rank * (nope + values) + values * h + (query_rank or h) * queries
        downs = (
            [rank + self.rotary_dim] if query_rank is None else [rank + self.rotary_dim, query_rank]
        )
        replicated = h * sum(downs) + rank + (query_rank or 0)
        biases = sum(downs) + h if self.bias else 0
        return Weights(split=split, replicated=replicated + biases)

    def _norm(self) -> Weights:
        return Weights(replicated=self.hidden_size * (2 if self.norm == "layer" else 1))

    def _feed_forward(self, size: int | None = None) -> Weights:
        size = self.intermediate_size if size is None else size
        products = 3 if self.gated else 2
        split = products * self.hidden_size * size
        if not self.bias:
            return Weights(split=split)
        return Weights(split=split + (products - 1) * size, replicated=self.hidden_size)

    def _experts(self) -> Weights:
        router = self.hidden_size * self.num_experts if self.router == "learned" else 0
        replicated = router + self.shared_gate * self.hidden_size
        if self.shared_size:  # tp gives each rank all of it, and some of the tokens
            replicated += self._feed_forward(self.shared_size).total
        experts = self._feed_forward(self.expert_width).total * self.num_experts
        return Weights(replicated=replicated, experts=experts)


def describe(model: TransformerConfig) -> dict[str, Any]:
    """Return the sizes by name, those that are not given as what they mean."""
    given = asdict(model)
    meant: dict[str, Any] = {
        "num_kv_heads": model.kv_heads,
        "head_dim": model.size_of_head,
        "moe_layers": model.sparse_layers,
        "expert_size": model.expert_width if model.num_experts else None,
    }
    if model.rope_scaling is not None:
        kind = model.rope_scaling.kind
        names = (*(("kind",) if kind != "llama3" else ()), *KINDS[kind])
        meant["rope_scaling"] = {name: getattr(model.rope_scaling, name) for name in names}
    return given | meant
