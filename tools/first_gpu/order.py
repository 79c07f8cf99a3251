"""Which ops come first where time on a GPU is short: tests, compilations and measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# What every transformer runs, then what many do; all others follow by name.
FIRST = (
    "rms_norm",
    "attention",
    "linear_glu",
    "linear_act",
    "cross_entropy",
    "swiglu",
    "rotary_embedding",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "gelu",
    "mlp",
    "moe_mlp",
    "grouped_mm",
    "linear_cross_entropy",
    "attention_decode",
    "attention_varlen",
    "bias_dropout_add",
    "bias_gelu",
    "geglu",
    "scaled_masked_softmax",
)
# Most tests of a dtype fail together.
DTYPES = ("bfloat16", "float16", "float32", "float64")


def rank(op: str) -> tuple[int, str]:
    """Return what ops are sorted by, the most important one first."""
    return (FIRST.index(op) if op in FIRST else len(FIRST), op)


def ordered(ops: Iterable[str], dtypes: Sequence[str] = DTYPES) -> list[tuple[str, str]]:
    """Return op and dtype of all that is to be done: every op in the first dtype comes first."""
    names = sorted(ops, key=rank)
    return [(op, dtype) for dtype in dtypes for op in names]


def smallest_first(sizes: Mapping[str, int]) -> list[str]:
    """Return ops by their numbers of tests, in powers of two, then by importance."""
    return sorted(sizes, key=lambda op: (sizes[op].bit_length(), rank(op)))
