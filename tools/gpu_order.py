"""Which ops come first where time on a GPU is short: tests, compilations and benchmarks obey it."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

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


def shard_of(op: str, shards: int) -> int:
    """Return which of so many shards has an op: all of it, because a kernel compiles once then.

    The important ones are dealt out in turn, so that each shard begins with some.
    """
    if op in FIRST:
        return FIRST.index(op) % shards
    return zlib.crc32(op.encode()) % shards


def parse_shard(text: str) -> tuple[int, int]:
    """Return index and number of ``"2/4"``: 1 and 4.

    Raises:
        ValueError: this is no shard.
    """
    first, _, second = text.partition("/")
    if not (first.isdigit() and second.isdigit() and 1 <= int(first) <= int(second)):
        raise ValueError(f"a shard is K/N with 1 <= K <= N, such as 1/4, not {text!r}")
    return int(first) - 1, int(second)


def ordered(ops: Iterable[str], dtypes: Sequence[str] = DTYPES) -> list[tuple[str, str]]:
    """Return op and dtype of all that is to be done: every op in the first dtype comes first."""
    names = sorted(ops, key=rank)
    return [(op, dtype) for dtype in dtypes for op in names]


def main() -> None:
    """Print the ops that have benchmarks, the most important one first."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from fusedops.specs import all_specs

    print("\n".join(sorted(all_specs(), key=rank)))


if __name__ == "__main__":
    main()
