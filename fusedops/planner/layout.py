"""How a model is trained: the parallel sizes, the precision, what is made again, what is off.

A layout is checked against a model before anything is computed: the message says which product is
wrong, and which sizes would fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.models.parallelization.config import RECOMPUTE_FLAGS, check_recompute, check_split
from fusedops.parallel.pipeline.schedules import SCHEDULES, check_schedule
from fusedops.parallel.sizes import check_divides, check_ranks
from fusedops.planner.pipelines import Pipelined, pipelined, places

_OP = "plan"
KERNELS = ("fused", "stock", "eager")
OFFLOADS = ("optimizer", "activations")
# What ``recompute`` may make again, beside all of it.
REMADE = ("scores", "norm", "activation")
RECOMPUTE = ("none", "selective", "full", *REMADE)


@dataclass(frozen=True)
class Precision:
    """Bytes of each number.

    Attributes:
        weights: of the weights that the layers read.
        gradients: of the gradients as they are accumulated.
        master: of the optimizer's own copy of the weights; 0: it updates the weights.
        moments: of AdamW's two moments together.
        activations: of what products and attention compute.
        stream: of the sums that go from layer to layer, which norms read.
        casts: of the copies of weights that autocast makes in the forward and keeps for the
            backward.
    """

    weights: int
    gradients: int
    master: int
    moments: int
    activations: int
    stream: int
    casts: int = 0

    @property
    def states(self) -> int:
        """Bytes of the optimizer per parameter."""
        return self.master + self.moments


PRECISIONS = {
    "float32": Precision(4, 4, 0, 8, 4, 4),
    "autocast": Precision(4, 4, 0, 8, 2, 4, casts=2),
    "mixed": Precision(2, 4, 4, 8, 2, 2),
    "half-gradients": Precision(2, 2, 4, 8, 2, 2),
    "half": Precision(2, 2, 0, 4, 2, 2),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread over devices, and what its training keeps.

    Devices are ``dp * tp * pp * cp``. Experts are divided over ``ep`` ranks of the
    data-parallel ones.

    Attributes:
        dp: data parallel: copies of the model.
        tp: tensor parallel: shares of each product.
        pp: pipeline parallel: stages.
        cp: context parallel: shares of each sequence.
        ep: expert parallel, inside of ``dp * cp``.
        zero: what of each parameter is divided over ``dp * cp``: 0 nothing, 1 optimizer states,
            2 gradients as well, 3 weights as well.
        sp: sequence parallel: norms, dropout and residual sums on ``1 / tp`` of the tokens.
        micro_batch: sequences of a micro-batch, on each data-parallel rank.
        microbatches: micro-batches of a step, on each data-parallel rank.
        seq_len: tokens of a sequence; the model's longest by default.
        pipeline_schedule: as of ``ParallelConfig``.
        pipeline_virtual: stages of a rank; the schedule's own number by default.
        precision: a name of ``PRECISIONS``.
        kernels: ``"fused"``: what this package's ops keep; ``"stock"``: transformers' modules in
            eager torch, with fused attention; ``"eager"``: with the attention's scores in memory.
        dropout: whether masks of dropout are kept (this package's ops keep none).
        chunked_loss: ``linear_cross_entropy``: the logits are never whole.
        recompute: ``"none"``, ``"full"`` (only the inputs of layers are kept), or what is made
            again joined by ``+``: ``"scores"``, ``"norm"``, ``"activation"``; ``"selective"`` is
            all three.
        recompute_slice_activation: keep ``1 / tp`` of what full recomputation keeps.
        mp_comm_recompute: repeat tensor parallelism's communication when a layer is made again,
            instead of keeping what it gave.
        parallel_optimizer_comm_recompute: gather ``zero=3``'s weights again in the backward,
            instead of keeping them from the forward on.
        offload: ``"optimizer"``: masters and moments on the host (``OffloadedAdamW``);
            ``"activations"``: what layers keep on the host, but for two layers.
        overlap: the offloaded optimizer steps during the backward, beside the states that it
            starts from; else in place, with half of the host's memory.
        bucket_bytes: of gradients that travel together.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    sp: bool = False
    micro_batch: int = 1
    microbatches: int = 1
    seq_len: int | None = None
    pipeline_schedule: str = "1f1b"
    pipeline_virtual: int | None = None
    precision: str = "mixed"
    kernels: str = "fused"
    dropout: bool = False
    chunked_loss: bool = False
    recompute: str = "none"
    recompute_slice_activation: bool = False
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = True
    offload: tuple[str, ...] = ()
    overlap: bool = True
    bucket_bytes: int = 25 << 20

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def bytes_of(self) -> Precision:
        """The bytes of each number."""
        return PRECISIONS[self.precision]

    @property
    def bytes_of_experts(self) -> int:
        """Bytes of what experts compute: autocast does not know torch's product of experts."""
        sizes = self.bytes_of
        return sizes.stream if sizes.casts and self.kernels != "fused" else sizes.activations

    @property
    def remade(self) -> frozenset[str]:
        """What is made again in the backward, in words of ``REMADE``."""
        words = self.recompute.split("+")
        return frozenset(REMADE if "selective" in words else words) & set(REMADE)

    @property
    def virtual(self) -> int:
        """Stages of a rank."""
        own = SCHEDULES[self.pipeline_schedule].virtual
        return own if self.pipeline_virtual is None else self.pipeline_virtual

    @property
    def stages(self) -> int:
        """Stages of all ranks."""
        return 1 if self.pp == 1 else self.pp * self.virtual

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank waits, with equal stages.

        ``(p - 1) / (v m + p - 1)`` with GPipe, 1F1B and the interleaved schedule.
        """
        return self._pipelined.bubble

    @property
    def _pipelined(self) -> Pipelined:
        if self.pp == 1:
            return Pipelined(0.0, (1.0,))
        return pipelined(self.pipeline_schedule, self.pp, self.microbatches, self.virtual)

    def tokens(self, model: TransformerConfig) -> int:
        """Return the tokens of a micro-batch on one device, before ``sp``."""
        return self.micro_batch * self.length(model) // self.cp

    def length(self, model: TransformerConfig) -> int:
        """Return the tokens of a sequence."""
        return model.seq_len if self.seq_len is None else self.seq_len

    @property
    def in_flight(self) -> tuple[float, ...]:
        """Of how many micro-batches each rank of the pipeline keeps what its layers save.

        ``min(p - rank, m)`` with 1F1B, m with GPipe; interleaved by v the first rank keeps
        ``(1 + (p - 1) / (p v)) p`` of them.
        """
        return self._pipelined.alive

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank of the pipeline."""
        return [0] if self.pp == 1 else places(self.pipeline_schedule, self.pp, self.virtual, rank)


def check(model: TransformerConfig, layout: Layout, devices: int | None = None) -> None:
    """Raise unless the layout has a meaning, fits the model, and takes this many devices.

    Args:
        model: what is trained.
        layout: how.
        devices: how many there are; not looked at if ``None``.

    Raises:
        ValueError: a size does not fit; the message says which sizes would.
        TypeError: a size is no integer.
    """
    check_values(layout)
    if devices is not None:
        sizes = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp")}
        check_ranks(_OP, sizes, devices)
    check_split(_OP, model, tp=layout.tp, ep=layout.ep, data=layout.dp * layout.cp)
    if layout.pp > 1:
        parts, virtual = layout.microbatches, layout.pipeline_virtual
        check_schedule(_OP, layout.pipeline_schedule, layout.pp, parts, virtual)
    elif layout.pipeline_virtual not in (None, 1):
        wanted = "1 where there is one stage"
        checks.fail(_OP, "pipeline_virtual", wanted, layout.pipeline_virtual)
    what = "pp" if layout.virtual == 1 else "pp x pipeline_virtual"
    check_divides(_OP, what, layout.stages, model.depth, "the layers")
    length = layout.length(model)
    if model.position_tables and length > model.seq_len:
        wanted = f"at most {model.seq_len}, the positions that the model has"
        checks.fail(_OP, "seq_len", wanted, length)
    check_divides(_OP, "cp", layout.cp, length, "the tokens of a sequence")
    if layout.sp:
        check_divides(_OP, "tp", layout.tp, layout.tokens(model), "the tokens of a device (sp)")


def check_values(layout: Layout) -> None:
    """Raise unless each value of a layout has a meaning, whatever the model.

    Raises:
        ValueError: one has none.
        TypeError: one has another type.
    """
    for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "microbatches"):
        checks.integer(_OP, name, getattr(layout, name), least=1)
    checks.integer(_OP, "bucket_bytes", layout.bucket_bytes, least=0)
    for name in ("sp", "dropout", "chunked_loss", "overlap", *RECOMPUTE_FLAGS):
        checks.flag(_OP, name, getattr(layout, name))
    if layout.seq_len is not None:
        checks.integer(_OP, "seq_len", layout.seq_len, least=1)
    checks.integer(_OP, "zero", layout.zero, least=0)
    if layout.zero > 3:
        checks.fail(_OP, "zero", "0, 1, 2 or 3", layout.zero)
    checks.choice(_OP, "pipeline_schedule", layout.pipeline_schedule, tuple(SCHEDULES))
    if layout.pipeline_virtual is not None:
        checks.integer(_OP, "pipeline_virtual", layout.pipeline_virtual, least=1)
    checks.choice(_OP, "precision", layout.precision, PRECISIONS)
    checks.choice(_OP, "kernels", layout.kernels, KERNELS)
    check_recompute(
        _OP,
        layout.recompute,
        RECOMPUTE,
        slice_activation=layout.recompute_slice_activation,
        sp=layout.sp,
    )
    if not isinstance(layout.offload, tuple):
        got = checks.shown(layout.offload)
        raise TypeError(f"{_OP}: offload must be a tuple of words, got {got}")
    for word in layout.offload:
        checks.choice(_OP, "offload", word, OFFLOADS)
