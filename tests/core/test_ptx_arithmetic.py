"""Each instruction of one lane, and of a warp, computes what the PTX manual says at edge values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import pytest
from ptx_kernels import BITS, Row, check, computed, decoded, encoded, finite, signed

pytestmark = pytest.mark.ci  # the machine is compiled first


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shifted(a: int, by: int, width: int) -> int:
    return a >> min(by, width)  # of a negative number the sign comes in


# Operands are numbers of the type; its results are taken modulo 2 to the power of its width.
Integers = Callable[..., int]
TWO: dict[str, Integers] = {
    "add.s": lambda a, b: a + b,
    "add.u": lambda a, b: a + b,
    "sub.s": lambda a, b: a - b,
    "sub.u": lambda a, b: a - b,
    "mul.lo.s": lambda a, b: a * b,
    "mul.lo.u": lambda a, b: a * b,
    "and.b": lambda a, b: a & b,
    "or.b": lambda a, b: a | b,
    "xor.b": lambda a, b: a ^ b,
    "min.s": min,
    "min.u": min,
    "max.s": max,
    "max.u": max,
    # What a division by zero gives is not specified.
    "div.s": truncated,
    "div.u": truncated,
    "rem.s": lambda a, b: a - b * truncated(a, b),
    "rem.u": lambda a, b: a % b,
}
ONE: dict[str, Integers] = {"not.b": lambda a: ~a, "neg.s": lambda a: -a, "abs.s": abs}
COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
LETTERS = {16: "h", 32: "r", 64: "d"}


def edges(width: int) -> list[int]:
    top = 1 << (width - 1)
    return [0, 1, 3, top - 1, top, top + 1, 2 * top - 1, 0x5A5A5A5A5A5A5A5A % (2 * top)]


def of_type(value: int, kind: str, width: int) -> int:
    return signed(value, width) if kind == "s" else value


@pytest.mark.parametrize("width", [16, 32, 64])
def test_integers(width: int) -> None:
    letter, values, most = LETTERS[width], edges(width), (1 << width) - 1
    for name, function in TWO.items():
        pairs = [(a, b) for a in values for b in values if b or name[:3] not in ("div", "rem")]
        kind = name[-1]
        given = [(of_type(a, kind, width), of_type(b, kind, width)) for a, b in pairs]
        rows = [(*p, function(*g) & most) for p, g in zip(pairs, given, strict=True)]
        check(f"{name}{width}", letter * 3, rows)
    for name, function in ONE.items():
        check(
            f"{name}{width}",
            letter * 2,
            [(a, function(of_type(a, name[-1], width)) & most) for a in values],
        )
    for kind in "su":
        sums = [(a, b, 77, (a * b + 77) & most) for a in values for b in values]
        check(f"mad.lo.{kind}{width}", letter * 4, sums)
    amounts = [0, 1, width - 1, width, width + 1, 31, 32, 255, 1 << 31, (1 << 32) - 1]
    for kind in "sub":
        rows = [
            (a, by, shifted(of_type(a, kind, width), by, width) & most)
            for a in values
            for by in amounts
        ]
        check(f"shr.{kind}{width}", f"{letter}{letter}r", rows)
    rows = [(a, by, a << min(by, width) & most) for a in values for by in amounts]
    check(f"shl.b{width}", f"{letter}{letter}r", rows)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_comparisons_of_integers(width: int) -> None:
    letter, pairs = LETTERS[width], list(itertools.product(edges(width), repeat=2))
    for kind in "sub":
        names = {name: name for name in COMPARED} if kind != "b" else {"eq": "eq", "ne": "ne"}
        for name, like in {**names, **(UNSIGNED if kind == "u" else {})}.items():
            rows = []
            for a, b in pairs:
                true = COMPARED[like](of_type(a, kind, width), of_type(b, kind, width))
                rows.append((a, b, 1 if true else 2))  # the second predicate is the opposite
            check(f"setp.{name}.{kind}{width}", "p" + letter * 2, rows, "{0}|%p7")
        chosen = [(a, b, p, a if p else b) for a, b in pairs[:20] for p in (0, 1)]
        check(f"selp.{kind}{width}", f"{letter * 3}p", chosen)


def wide_products(kind: str, width: int) -> list[Row]:
    return [
        (a, b, of_type(a, kind, width) * of_type(b, kind, width))
        for a in edges(width)
        for b in edges(width)
    ]


def modulo(rows: Iterable[Row], width: int) -> list[Row]:
    return [(*row[:-1], row[-1] % (1 << width)) for row in rows]


PRODUCTS = {
    **{f"mul.wide.{kind}16": ("rhh", 32, 0) for kind in "su"},
    **{f"mul.wide.{kind}32": ("drr", 64, 0) for kind in "su"},
    **{f"mul.hi.{kind}32": ("rrr", 32, 32) for kind in "su"},
    "mul.hi.u64": ("ddd", 64, 64),
}


@pytest.mark.parametrize("opcode", PRODUCTS)
def test_wide_products(opcode: str) -> None:
    signature, width, by = PRODUCTS[opcode]
    rows = wide_products(opcode[-3], BITS[signature[1]])
    check(opcode, signature, modulo([(a, b, c >> by) for a, b, c in rows], width))
    if signature == "drr":
        added = (1 << 64) - 5
        rows = modulo([(a, b, added, c + added) for a, b, c in rows], 64)
        check(opcode.replace("mul", "mad"), "drrd", rows)


def field(value: int, begin: int, length: int, sign: bool) -> int:
    """Return bits of 32, counted from the least; what is above them is their sign, or zero."""
    begin, length = begin % 256, length % 256
    last = value >> min(begin + length - 1, 31) & 1 if length and sign else 0
    return sum(
        (value >> (begin + i) & 1 if i < length and begin + i < 32 else last) << i
        for i in range(32)
    )


def test_bits() -> None:
    values = [0x80000000, 0x7FFFFFFF, 0x12345678, 0xDEADBEEF, 0, 0xFFFFFFFF]
    places = [(0, 0), (0, 1), (0, 32), (31, 1), (28, 8), (4, 5), (32, 4), (256, 3), (3, 260)]
    for kind in "su":
        rows = [(v, b, n, field(v, b, n, kind == "s")) for v in values for b, n in places]
        check(f"bfe.{kind}32", "rrrr", rows)
    check("popc.b32", "rr", [(v, v.bit_count()) for v in values])
    check("clz.b32", "rr", [(v, 32 - v.bit_length()) for v in values])
    a, b = 0x33221180, 0x77F65544  # bytes 0 to 3 and 4 to 7
    rows = [
        (a, b, 0x3210, a),
        (a, b, 0x7654, b),
        (a, b, 0x0123, 0x80112233),
        (a, b, 0x6420, 0xF6442280),
        (a, b, 0x80E0, 0xFF80FF80),  # 8: eight times the sign of byte 0
        (a, b, 0xF9EC, 0x0000FF00),
        (a, b, 0xABCD3210, a),  # of the selector 16 bits count
    ]
    check("prmt.b32", "rrrr", rows)
    rows = [
        (0x89ABCDEF, 0x01234567, by, (0x0123456789ABCDEF << by % 32) >> 32 & 0xFFFFFFFF)
        for by in (0, 1, 4, 31, 32, 36, 255)
    ]
    check("shf.l.wrap.b32", "rrrr", rows)
    for name, function in {
        "and": lambda p, q: p and q,
        "or": lambda p, q: p or q,
        "xor": lambda p, q: p != q,
    }.items():
        check(f"{name}.pred", "ppp", [(p, q, int(function(p, q))) for p in (0, 1) for q in (0, 1)])
    check("not.pred", "pp", [(0, 1), (1, 0)])


# ---- floats

NANS = {"bf16": 0x7FFF, "f16": 0x7FFF, "f32": 0x7FFFFFFF}  # canonical
WIDTHS = {"bf16": "h", "f16": "h", "f32": "r", "f64": "d"}
INF = math.inf
EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
}


def exact_rows(name: str, kind: str, spread: int) -> list[Row]:
    count = 3 if name == "fma" else 2
    operands = [finite(kind, 200, seed, spread) for seed in range(count)]
    rows = []
    for row in zip(*operands, strict=True):
        value = EXACT[name](*(Fraction(decoded(x, kind)) for x in row))
        if value:
            rows.append((*row, encoded(value, kind)))
    return rows


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        *((f"{name}.f32", "f32") for name in ("add", "sub", "mul")),
        *((f"{name}.rn.f32", "f32") for name in ("add", "sub", "mul", "fma", "div")),
        *((f"{name}.f64", "f64") for name in ("add", "sub", "mul", "mul.rn", "fma.rn")),
        *((f"{name}.bf16", "bf16") for name in ("add", "sub", "mul", "mul.rn", "fma.rn")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spread", [3, 80])
def test_floats_round_to_nearest(opcode: str, kind: str, spread: int) -> None:
    name = opcode.split(".")[0]
    letter = WIDTHS[kind]
    rows = exact_rows(name, kind, spread)
    check(opcode, letter * (2 + (name in ("add", "sub", "mul", "div")) + 2 * (name == "fma")), rows)


def f32(*values: float) -> Row:
    return tuple(encoded(value, "f32") for value in values)


def bf16(*values: float) -> Row:
    return tuple(encoded(value, "bf16") for value in values)


TINY, LEAST = 2.0**-130, 2.0**-126  # a subnormal number, and the least normal one
NAN = math.nan
FLOAT_ROWS: dict[str, list[Row]] = {
    "add.f32": [f32(-0.0, 0.0, 0.0), f32(-0.0, -0.0, -0.0), f32(TINY, TINY, 2 * TINY)],
    "sub.f32": [f32(0.0, 0.0, 0.0), f32(-0.0, 0.0, -0.0), f32(INF, 1, INF)],
    "mul.f32": [f32(-0.0, 3, -0.0), f32(LEAST, 0.5, LEAST / 2), f32(2.0**100, -(2.0**100), -INF)],
    "fma.rn.f32": [f32(1 + 2.0**-23, 1 - 2.0**-23, -1, -(2.0**-46)), f32(LEAST, 0.5, 0, LEAST / 2)],
    "fma.rn.ftz.f32": [
        f32(LEAST, 0.5, 0, 0),
        f32(LEAST, -0.5, -0.0, -0.0),
        f32(TINY, 2.0**20, 1, 1),
        f32(1, 1, TINY, 1),
        f32(LEAST, 1, LEAST, 2 * LEAST),
    ],
    "neg.f32": [f32(0.0, -0.0), f32(INF, -INF), f32(TINY, -TINY)],
    "abs.f32": [f32(-0.0, 0.0), f32(-INF, INF), f32(-TINY, TINY)],
    "min.f32": [
        f32(0.0, -0.0, -0.0),
        f32(-0.0, 0.0, -0.0),
        f32(NAN, 2, 2),
        f32(2, NAN, 2),
        (0xFFC12345, 0x7FC00001, NANS["f32"]),
        f32(-INF, 1, -INF),
        f32(TINY, 1, TINY),
    ],
    "max.f32": [
        f32(0.0, -0.0, 0.0),
        f32(-0.0, 0.0, 0.0),
        f32(NAN, -INF, -INF),
        f32(-2, NAN, -2),
        (0xFFC12345, 0x7FC00001, NANS["f32"]),
        f32(-TINY, -1, -TINY),
    ],
    "min.NaN.f32": [(0xFFC12345, *f32(1), NANS["f32"]), f32(1, NAN, NAN), f32(0.0, -0.0, -0.0)],
    "max.NaN.f32": [(*f32(INF), 0x7F812345, NANS["f32"]), f32(1, 2, 2), f32(-0.0, 0.0, 0.0)],
    "div.rn.f32": [f32(1, 0.0, INF), f32(1, -0.0, -INF), f32(1, INF, 0), f32(LEAST, 2, LEAST / 2)],
    "sqrt.rn.f32": [f32(-0.0, -0.0), f32(INF, INF), f32(4, 2), f32(2.0**-140, 2.0**-70)],
    "abs.bf16": [bf16(-3, 3), bf16(-0.0, 0.0), bf16(-INF, INF)],
    "neg.bf16": [bf16(-3, 3), bf16(0.0, -0.0)],
    "min.bf16": [bf16(0.0, -0.0, -0.0), bf16(NAN, 2, 2), (0xFFC1, 0x7FC1, NANS["bf16"])],
    "max.bf16": [bf16(-0.0, 0.0, 0.0), bf16(NAN, -2, -2), (0xFFC1, 0x7FC1, NANS["bf16"])],
    # One rounding: 9 * 29 lies between 260 and 262, and what is added decides.
    "fma.rn.bf16": [
        bf16(9, 29, 2.0**-40, 262),
        bf16(9, 29, -(2.0**-40), 260),
        bf16(9, 29, 2.0**-120, 262),
        bf16(9, 29, 0, 260),
        bf16(2.0**100, 2.0**100, 1, INF),
        bf16(2.0**100, 2.0**100, -INF, -INF),
        bf16(2.0**-80, 2.0**-50, 0, 2.0**-130),
    ],
    "mul.bf16": [bf16(9, 29, 260), bf16(2.0**100, -(2.0**100), -INF), bf16(-0.0, 1, -0.0)],
}


@pytest.mark.parametrize("opcode", FLOAT_ROWS)
def test_floats_at_edges(opcode: str) -> None:
    rows = FLOAT_ROWS[opcode]
    check(opcode, WIDTHS[opcode.split(".")[-1]] * len(rows[0]), rows)


def test_what_is_no_number_gives_a_nan() -> None:
    cases = {
        "add.f32": f32(INF, -INF),
        "sub.f32": f32(INF, INF),
        "mul.f32": f32(INF, 0),
        "div.rn.f32": f32(0, 0),
        "fma.rn.f32": f32(INF, 0, 1),
        "sqrt.rn.f32": f32(-1),
    }
    for opcode, row in cases.items():
        assert math.isnan(decoded(computed(opcode, "r" * (len(row) + 1), [row])[0], "f32"))
    for opcode, row in {"fma.rn.bf16": bf16(INF, 0, 1), "add.bf16": bf16(INF, -INF)}.items():
        assert computed(opcode, "h" * (len(row) + 1), [row]) == [NANS["bf16"]]


def pair(low: int, high: int, width: int) -> int:
    return high << width | low


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        *((f"{name}.f32x2", "f32") for name in ("add", "sub", "mul", "mul.rn", "fma.rn")),
        *((f"{name}.bf16x2", "bf16") for name in ("add", "fma.rn")),
    ],
)
def test_packed_floats(opcode: str, kind: str) -> None:
    name, width = opcode.split(".")[0], 32 if kind == "f32" else 16
    rows = exact_rows(name, kind, 3)
    if kind == "bf16" and name == "fma":
        rows += [bf16(9, 29, 2.0**-40, 262), bf16(9, 29, 0, 260)]
    both = [
        tuple(pair(x, y, width) for x, y in zip(low, high, strict=True))
        for low, high in zip(rows[::2], rows[1::2], strict=False)
    ]
    check(opcode, ("d" if width == 32 else "r") * len(both[0]), both)


def test_mixed_floats() -> None:
    """The bfloat16 operand is the first one; the sum is rounded to float32 once."""
    halves, floats = finite("bf16", 100, 3, 20), finite("f32", 100, 4, 20)
    for name, sign in (("add", 1), ("sub", -1)):
        rows = [
            (
                h,
                f,
                encoded(Fraction(decoded(h, "bf16")) + sign * Fraction(decoded(f, "f32")), "f32"),
            )
            for h, f in zip(halves, floats, strict=True)
        ]
        check(f"{name}.rn.f32.bf16", "rhr", rows)


COMPARED_KINDS = {"f32": "r", "f64": "d", "bf16": "h", "f16": "h"}


@pytest.mark.parametrize("kind", COMPARED_KINDS)
def test_comparisons_of_floats(kind: str) -> None:
    """With a NaN an ordered comparison is false, an unordered one is true."""
    values = [-INF, -1.0, -0.0, 0.0, 2.0**-24, 1.0, INF, NAN]
    pairs = [(a, b, encoded(a, kind), encoded(b, kind)) for a in values for b in values]
    for name, function in COMPARED.items():
        for unordered in (False, True):
            rows = []
            for a, b, x, y in pairs:
                nan = math.isnan(a) or math.isnan(b)
                true = unordered if nan else function(a, b)
                rows.append((x, y, 1 if true else 2))
            opcode = f"setp.{name}{'u' * unordered}.{kind}"
            check(opcode, "p" + COMPARED_KINDS[kind] * 2, rows, "{0}|%p7")
    for name, expected in (("num", 0), ("nan", 1)):
        rows = [
            (x, y, 1 if expected == (math.isnan(a) or math.isnan(b)) else 2) for a, b, x, y in pairs
        ]
        check(f"setp.{name}.{kind}", "p" + COMPARED_KINDS[kind] * 2, rows, "{0}|%p7")


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["eq", "lt", "gt"])
def test_comparisons_of_packed_floats(kind: str, name: str) -> None:
    """The first predicate is of the low halves, the second one of the high halves."""
    values = [-INF, -0.0, 0.0, 1.0, NAN]
    pairs = [(a, b) for a in values for b in values]
    rows = []
    for (a, b), (c, d) in zip(pairs, pairs[7:] + pairs[:7], strict=True):
        low, high = COMPARED[name](a, b), COMPARED[name](c, d)
        first, second = (pair(encoded(x, kind), encoded(y, kind), 16) for x, y in ((a, c), (b, d)))
        rows.append((first, second, low + 2 * high))
    check(f"setp.{name}.{kind}x2", "prr", rows, "{0}|%p7")


# ---- conversions

SPECIAL = [0.0, -0.0, INF, -INF, NAN, 65504.0, 65519.99, 65520.0, 2.0**-24, 2.0**-25, 2.0**-133]
TIES = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
HUGE = [float.fromhex("0x1.fep127"), float.fromhex("0x1.fefffep127"), float.fromhex("0x1.ffp127")]
NARROWED = [*f32(*SPECIAL, *TIES, *HUGE), *finite("f32", 60, 5, 20), 0x7F800001, 0xFFC12345]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_narrowing(kind: str) -> None:
    """To nearest, ties to even; what is too large is infinite; each NaN is the canonical one."""
    rows = [(x, encoded(decoded(x, "f32"), kind)) for x in NARROWED]
    rows = [(x, NANS[kind] if math.isnan(decoded(x, "f32")) else y) for x, y in rows]
    check(f"cvt.rn.{kind}.f32", "hr", rows)
    # Of two operands the first becomes the high half.
    both = [(x, y, pair(b, a, 16)) for (x, a), (y, b) in zip(rows, rows[1:], strict=False)]
    check(f"cvt.rn.{kind}x2.f32", "rrr", both)


def test_widening() -> None:
    halves = [*bf16(0.0, -0.0, INF, -INF, 1, 2.0**-130), *finite("bf16", 40)]
    for to, letter in (("f32", "r"), ("f64", "d")):
        rows = [(x, encoded(decoded(x, "bf16"), to)) for x in halves]
        check(f"cvt.{to}.bf16", f"{letter}h", rows)
    halves = [0, 0x8000, 0x7C00, 0xFC00, 1, 0x3FF, 0x400, 0x7BFF, *finite("f16", 40)]
    check("cvt.f32.f16", "rh", [(x, encoded(decoded(x, "f16"), "f32")) for x in halves])
    floats = [*f32(0.0, -0.0, INF, TINY), *finite("f32", 40)]
    check("cvt.f64.f32", "dr", [(x, encoded(decoded(x, "f32"), "f64")) for x in floats])
    doubles = [encoded(x, "f64") for x in (1 + 2.0**-24, 1 + 3 * 2.0**-24, 1e300, -0.0, 2.0**-149)]
    doubles += finite("f64", 40, spread=100)
    check("cvt.rn.f32.f64", "rd", [(x, encoded(decoded(x, "f64"), "f32")) for x in doubles])


FROM_INTEGERS = {"s16": "h", "u16": "h", "s32": "r", "u32": "r", "s64": "d", "u64": "d"}


@pytest.mark.parametrize("kind", FROM_INTEGERS)
def test_integers_become_floats(kind: str) -> None:
    width = int(kind[1:])
    values = [*edges(width), 2**24 + 1 & (1 << width) - 1, 2**24 + 3 & (1 << width) - 1]
    rows = [(x, encoded(Fraction(of_type(x, kind[0], width)), "f32")) for x in values]
    check(f"cvt.rn.f32.{kind}", f"r{FROM_INTEGERS[kind]}", rows)


def test_floats_become_integers() -> None:
    """Toward zero, clamped; NaN is 0 unless source or result have 64 bits: then the least."""
    values = [0.0, -0.0, 0.9, -0.9, 1.5, -1.5, 2.0**31, -(2.0**31), 2.0**40, INF, -INF]
    for opcode, source, width, nan in (
        ("cvt.rzi.s32.f32", "f32", 32, 0),
        ("cvt.rzi.s64.f64", "f64", 64, 1 << 63),
    ):
        most = (1 << (width - 1)) - 1
        rows = []
        for value in [*values, 2.0**63, -(2.0**63), 2.0**31 - 1, -(2.0**62)]:
            number = value if math.isinf(value) else int(decoded(encoded(value, source), source))
            clamped = int(max(min(number, most), -most - 1))
            rows.append((encoded(value, source), clamped % (1 << width)))
        rows.append((encoded(NAN, source), nan))
        check(opcode, f"{LETTERS[width]}{WIDTHS[source]}", rows)


INTEGER_CONVERSIONS = {
    "cvt.s16.s8": "hh",
    "cvt.s32.s8": "rh",
    "cvt.s32.s16": "rh",
    "cvt.u16.u64": "hd",
    "cvt.u64.u16": "dh",
    "cvt.s64.s32": "dr",
    "cvt.u64.u32": "dr",
    "cvt.u32.u64": "rd",
    "cvt.u16.u32": "hr",
    "cvt.u32.u16": "rh",
}


@pytest.mark.parametrize("opcode", INTEGER_CONVERSIONS)
def test_integers_become_integers(opcode: str) -> None:
    _, to, source = opcode.split(".")
    signature = INTEGER_CONVERSIONS[opcode]
    width, target = int(source[1:]), int(to[1:])
    values = edges(BITS[signature[1]])  # a register may be wider than the type
    rows = [(x, of_type(x % (1 << width), source[0], width) % (1 << target)) for x in values]
    check(opcode, signature, rows)


# ---- approximations: error as the manual states it, and the tables of what is no usual number

SMALL = 2.0**-127
APPROXIMATED: dict[
    str, tuple[Callable[[float], float], list[float], float, list[tuple[float, float]]]
] = {
    "ex2.approx.f32": (
        lambda x: 2.0**x,
        [-126.0, -20.3, -1.0, -0.5, 0.25, 1.0, 7.7, 127.5],
        2.0**-22,
        [
            (-INF, 0.0),
            (-SMALL, 1.0),
            (-0.0, 1.0),
            (0.0, 1.0),
            (SMALL, 1.0),
            (INF, INF),
            (128.0, INF),
        ],
    ),
    "ex2.approx.ftz.f32": (
        lambda x: 2.0**x,
        [-125.0, -20.3, 0.25, 127.5],
        2.0**-22,
        [(-INF, 0.0), (SMALL, 1.0), (INF, INF), (-130.0, 0.0), (-200.0, 0.0)],
    ),
    "lg2.approx.f32": (
        math.log2,
        [0.3, 3.0, 1e-30, 1e30, 2.0**-140],
        2.0**-20,
        [(-INF, NAN), (-1.0, NAN), (-0.0, -INF), (0.0, -INF), (INF, INF), (1.0, 0.0)],
    ),
    "rcp.approx.ftz.f32": (
        lambda x: 1 / x,
        [0.3, -3.0, 1e30, -1e-30, 2.0**126],
        2.0**-23,
        [
            (-INF, -0.0),
            (-SMALL, -INF),
            (-0.0, -INF),
            (0.0, INF),
            (SMALL, INF),
            (INF, 0.0),
            (2.0**127, 0.0),
        ],
    ),
    "rsqrt.approx.ftz.f32": (
        lambda x: 1 / math.sqrt(x),
        [0.3, 3.0, 1e30, 1e-30],
        2.0**-22.9,
        [
            (-INF, NAN),
            (-1.0, NAN),
            (-SMALL, -INF),
            (-0.0, -INF),
            (0.0, INF),
            (SMALL, INF),
            (INF, 0.0),
        ],
    ),
    "sqrt.approx.ftz.f32": (
        math.sqrt,
        [0.3, 3.0, 1e30, 1e-30],
        2.0**-23,
        [
            (-INF, NAN),
            (-1.0, NAN),
            (-SMALL, -0.0),
            (-0.0, -0.0),
            (0.0, 0.0),
            (SMALL, 0.0),
            (INF, INF),
        ],
    ),
}


@pytest.mark.parametrize("opcode", APPROXIMATED)
def test_approximations(opcode: str) -> None:
    function, usual, error, table = APPROXIMATED[opcode]
    found = computed(opcode, "rr", [f32(x) for x in usual])
    for x, bits in zip(usual, found, strict=True):
        x = decoded(f32(x)[0], "f32")
        assert decoded(bits, "f32") == pytest.approx(function(x), rel=2 * error), x
    table = [*table, (NAN, NAN)]
    found = computed(opcode, "rr", [f32(x) for x, _ in table])
    for (x, expected), bits in zip(table, found, strict=True):
        got = decoded(bits, "f32")
        assert math.isnan(got) if math.isnan(expected) else bits == f32(expected)[0], (x, got)


def test_full_division() -> None:
    """At most 2 units in the last place, over the full range."""
    rows = [row for row in exact_rows("div", "f32", 60) if abs(decoded(row[-1], "f32")) > LEAST]
    for row, bits in zip(rows, computed("div.full.f32", "rrr", rows), strict=True):
        assert abs(bits - row[-1]) <= 2
