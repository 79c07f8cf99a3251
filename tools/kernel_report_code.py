"""What the machine code of one kernel tells about its speed: its main loop, counted.

The main loop of a matrix kernel is the innermost one with products, of several (attention has one
for keys that need no look at positions) the one with the fewest other instructions per product; of
other kernels the innermost loop that moves the most bytes, and where none moves any all of the
code. Counts are per thread and pass, whatever predicates would leave out. A copy by tensor
descriptor is one instruction of one thread, and its bytes are not counted.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

# "  /*0a10*/   @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"
_INSTRUCTION = re.compile(r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?(?P<name>[A-Z][\w.]*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"^(?:HGMMA|HMMA|IGMMA|QGMMA)\.(?P<shape>\d+x\d+x\d+|\d+)\.")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
# A warp-group product whose left operand lies in registers too: "HGMMA... R24, R168, gdesc[UR16]".
_LEFT_IN_REGISTERS = re.compile(r"HGMMA\S+ \w+, R\d+, gdesc")
# "LDS.64", "STS.128", "LDSM.16.M88.4" and "STSM.16.MT88.2", of which the number counts four bytes.
_SHARED = re.compile(r"^(?:LDS|STS|LDGSTS)\b")
_MATRICES = re.compile(r"^(?:LDSM|STSM)\b.*?(?:\.(?P<count>[24]))?$")
# Bytes of a product's depth in one row or column, of every type: 16 of bfloat16, 8 of float32.
_DEPTH = 32

# Of the intermediate code: "async_tma_copy_global_to_local ... -> !ttg.memdesc<64x128xbf16, ...",
# "async_copy_global_to_local ... -> <64x128xbf16, ...", "tt.load ... : tensor<64x!tt.ptr<f32>, ..."
# and "warp_group_dot %a, %b, %c ... : ...<64x16xbf16, ...> * ... -> tensor<64x128xf32, ...>".
_COPY = re.compile(
    r"copy_global_to_local .*-> (?:!ttg\.memdesc)?<(?P<shape>(?:\d+x)+)[a-z]+(?P<bits>\d+)"
)
_LOAD = re.compile(r"= tt\.load .*: tensor<(?P<shape>(?:\d+x)+)!tt\.ptr<[a-z]+(?P<bits>\d+)")
_DOT = re.compile(r"(?:tt\.dot|warp_group_dot) .*? : .*?<\d+x(\d+)x.*-> tensor<(\d+)x(\d+)x")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A stretch of machine code, counted per thread.

    Attributes:
        instructions: all of them, products included.
        loads: width in bytes -> how many loads of global memory, copies to shared memory included.
        stores: width in bytes -> how many stores to global memory.
        products: shape ("64x128x16") -> how many matrix instructions.
        functions: exponentials, reciprocals and the like: an eighth of the rate.
        multiply_adds: of float32.
        pending: how many groups of warp-group products the most patient wait leaves running.
        operands: bytes that a warp group's products read from shared memory: the right operand, and
            the left one where it does not lie in registers.
        shared: bytes of shared memory that a thread reads and writes, copies into it included.
    """

    instructions: int
    loads: dict[int, int]
    stores: dict[int, int]
    products: dict[str, int]
    functions: int
    multiply_adds: int
    pending: int
    operands: int = 0
    shared: int = 0

    @property
    def num_products(self) -> int:
        """Matrix instructions."""
        return sum(self.products.values())

    @property
    def loaded(self) -> int:
        """Bytes that a thread loads."""
        return sum(width * count for width, count in self.loads.items())

    @property
    def moved(self) -> int:
        """Bytes that a thread loads and stores."""
        return self.loaded + sum(width * count for width, count in self.stores.items())


@dataclasses.dataclass(frozen=True)
class Code:
    """The machine code of a kernel.

    Attributes:
        main: its main loop, or all of it.
        rest: instructions outside of the main loop and of others like it.
        calls: calls of subroutines: what the hardware has no instruction for.
    """

    main: Loop
    rest: int
    calls: int


def read(text: str) -> Code:
    """Return what the output of ``nvdisasm`` tells of its kernel."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif (found := _INSTRUCTION.match(line)) and found["name"] != "NOP":
            lines.append(line)
    # Behind the last exit stand subroutines and the jump onto itself that ends every kernel.
    exits = [number for number, line in enumerate(lines) if re.search(r"\bEXIT\b", line)]
    lines = lines[: exits[-1] + 1] if exits else lines
    spans = _loops(lines, labels)
    counted = {span: _count(lines[span[0] : span[1] + 1]) for span in spans}
    with_products = {span: each for span, each in counted.items() if each.num_products}
    moving = {span: each for span, each in counted.items() if each.moved}
    whole = _count(lines)
    calls = sum(bool(re.search(r"\bCALL\b", line)) for line in lines)
    if with_products:
        inner = _innermost(with_products)
        main = min(inner.values(), key=lambda each: each.instructions / each.num_products)
        inside = sum(end - start + 1 for start, end in inner)
        return Code(main, len(lines) - inside, calls)
    if moving and not whole.num_products:
        main = max(_innermost(moving).values(), key=lambda each: each.moved)
        return Code(main, len(lines) - main.instructions, calls)
    return Code(whole, 0, calls)


def repeated_work(ttgir: str) -> float:
    """Return how often the tiles of the kernel's products are computed: 1, or more.

    The warps of a block stand in a grid over a tile of sums; where the grid reaches over the tile,
    several warps make the same sums, and all that follows is done as often.
    """
    layouts = {
        name: ([int(each) for each in warps.split(",")], [int(each) for each in shape.split(",")])
        for name, warps, shape in re.findall(
            r"^(#mma\d*) = #ttg\.nvidia_mma<\{.*?warpsPerCTA = \[([\d, ]+)\].*?"
            r"instrShape = \[([\d, ]+)\]",
            ttgir,
            re.MULTILINE,
        )
    }
    found = 1.0
    pattern = r"(?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<(\d+)x(\d+)x\w+, (#mma\d*)>"
    for rows, columns, layout in re.findall(pattern, ttgir):
        warps, shape = layouts[layout]
        over_rows = warps[0] * shape[0] / int(rows)
        over_columns = warps[1] * shape[1] / int(columns)
        found = max(found, max(1.0, over_rows) * max(1.0, over_columns))
    return found


def bytes_per_multiply_add(ttgir: str, *, copied: bool = False) -> float:
    """Return what the loop of a kernel's products loads for each multiply-add; 0 without products.

    Counted for the block, not per thread, so that copies by tensor descriptor are in it; of several
    loops the one that loads the most. With ``copied`` these copies alone.
    """
    loops: list[tuple[int, int, int]] = []  # indent, bytes, multiply-adds
    found = 0.0
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if loops and line.lstrip().startswith("}") and indent <= loops[-1][0]:
            _, loaded, work = loops.pop()
            found = max(found, loaded / work if work else 0.0)
        elif " scf.for " in line:
            loops.append((indent, 0, 0))
        elif loops:
            start, loaded, work = loops[-1]
            tile = _tile_bytes(line) if not copied or "async_tma_copy" in line else 0
            loops[-1] = (start, loaded + tile, work + _tile_work(line))
    return found


def _tile_bytes(line: str) -> int:
    """Return what a line of the intermediate code loads of a tile from global memory."""
    copied = _COPY.search(line) or _LOAD.search(line)
    if not copied:
        return 0
    elements = math.prod(int(size) for size in copied["shape"].rstrip("x").split("x"))
    return elements * int(copied["bits"]) // 8


def _tile_work(line: str) -> int:
    """Return the multiply-adds of a line of the intermediate code."""
    product = _DOT.search(line)
    return math.prod(map(int, product.groups())) if product else 0


def _loops(lines: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Return first and last line of what a jump back closes."""
    spans: dict[int, int] = {}
    for number, line in enumerate(lines):
        target = _TARGET.search(line) if re.search(r"\bBRA\b", line) else None
        start = labels.get(target[1], len(lines)) if target else len(lines)
        if start < number:
            spans[start] = max(number, spans.get(start, 0))
    return sorted(spans.items())


def _innermost(loops: dict[tuple[int, int], Loop]) -> dict[tuple[int, int], Loop]:
    return {
        (start, end): loop
        for (start, end), loop in loops.items()
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in loops)
    }


def _count(lines: list[str]) -> Loop:
    loads: collections.Counter[int] = collections.Counter()
    stores: collections.Counter[int] = collections.Counter()
    products: collections.Counter[str] = collections.Counter()
    functions = multiply_adds = pending = operands = shared = 0
    for line in lines:
        found = _INSTRUCTION.match(line)
        assert found is not None
        name = found["name"]
        if _SHARED.match(name):
            shared += _width(name)
        elif matrices := _MATRICES.match(name):
            shared += 4 * int(matrices["count"] or 1)
        if re.match(r"LDG\b|LDGSTS\b", name):
            loads[_width(name)] += 1
        elif re.match(r"STG\b", name):
            stores[_width(name)] += 1
        elif product := _PRODUCT.match(name):
            products[_shape(product["shape"])] += 1
            operands += _operands(line, product["shape"])
        elif name.startswith("MUFU"):
            functions += 1
        elif name.startswith("FFMA"):
            multiply_adds += 1
        elif wait := _WAIT.search(line):
            pending = max(pending, int(wait[1], 16))
    counts = (dict(loads), dict(stores), dict(products), functions, multiply_adds, pending)
    return Loop(len(lines), *counts, operands, shared)


def _operands(line: str, shape: str) -> int:
    """Return what a product reads from shared memory: nothing, where warps multiply registers."""
    if "HGMMA" not in line:
        return 0
    rows, columns, _ = map(int, shape.split("x"))
    return _DEPTH * (columns if _LEFT_IN_REGISTERS.search(line) else rows + columns)


def _width(name: str) -> int:
    """Return how many bytes an access moves: ``LDG.E.128``, ``LDG.E.U16``, ``LDG.E``."""
    for part in name.split("."):
        if part in ("128", "64"):
            return int(part) // 8
        if part in ("U16", "S16", "U8", "S8"):
            return int(part[1:]) // 8
    return 4


def _shape(text: str) -> str:
    """Return a shape with its crosses: ``HMMA.16816`` multiplies 16 x 8 x 16."""
    return {"16816": "16x8x16", "1688": "16x8x8", "884": "8x8x4"}.get(text, text)
