"""Placements in an arena are valid, near the lower bound, and exact where that can be proven."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from fusedops import UnsupportedError
from fusedops.cli.main import app
from fusedops.memory import arena
from fusedops.memory.arena import Placement
from fusedops.runtime import host_module

Buffers = tuple[list[int], list[int], list[int]]


def drawn(seed: int, count: int, times: int = 30, most: int = 40) -> Buffers:
    draw = random.Random(seed)
    lower = [draw.randrange(times) for _ in range(count)]
    upper = [begin + draw.randrange(1, times // 2) for begin in lower]
    return lower, upper, [draw.randrange(0, most) for _ in range(count)]


def cut(seed: int, pieces: int, side: int = 1 << 12) -> Buffers:
    """Return a square that was cut into rectangles, which fill it: the bound can be reached."""
    draw = random.Random(seed)
    boxes = [(0, side, 0, side)]
    while len(boxes) < pieces:
        box = max(boxes, key=lambda b: (b[1] - b[0]) * (b[3] - b[2]) * draw.uniform(0.3, 1))
        left, right, low, high = box
        boxes.remove(box)
        if (draw.random() < 0.5 and right - left > 2) or high - low < 3:
            middle = draw.randrange(left + 1, right)
            boxes += [(left, middle, low, high), (middle, right, low, high)]
        else:
            middle = draw.randrange(low + 1, high)
            boxes += [(left, right, low, middle), (left, right, middle, high)]
    draw.shuffle(boxes)
    left, right, low, high = zip(*boxes, strict=True)
    return list(left), list(right), [b - a for a, b in zip(low, high, strict=True)]


def overlaps(buffers: Buffers, offsets: tuple[int, ...]) -> list[tuple[int, int]]:
    lower, upper, size = buffers
    return [
        (a, b)
        for a, b in itertools.combinations(range(len(size)), 2)
        if lower[a] < upper[b] and lower[b] < upper[a]
        if offsets[a] < offsets[b] + size[b] and offsets[b] < offsets[a] + size[a]
        if size[a] and size[b]
    ]


def assert_valid(buffers: Buffers, found: Placement) -> None:
    lower, upper, size = buffers
    assert overlaps(buffers, found.offsets) == []
    ends = [offset + nbytes for offset, nbytes in zip(found.offsets, size, strict=True)]
    assert min(found.offsets, default=0) >= 0 and found.height >= max(ends, default=0)
    moments = set(lower)
    alive = [
        sum(n for b, e, n in zip(*buffers, strict=True) if b <= moment < e) for moment in moments
    ]
    assert found.height >= found.bound >= max(alive, default=0)


def lowest_gaps(buffers: Buffers, order: list[int]) -> int:
    """Return the height if buffers go to the lowest gap in this order."""
    lower, upper, size = buffers
    offsets: dict[int, int] = {}
    for index in order:
        spans = sorted(
            (offset, offset + size[other])
            for other, offset in offsets.items()
            if lower[other] < upper[index] and lower[index] < upper[other]
        )
        top = 0
        for begin, end in spans:
            if begin - top >= size[index]:
                break
            top = max(top, end)
        offsets[index] = top
    return max(offsets[index] + size[index] for index in offsets)


@pytest.mark.parametrize("seed", range(20))
def test_placements_are_valid_and_no_worse_than_greedy_orders(seed: int) -> None:
    buffers = drawn(seed, 5 + 6 * seed)
    lower, upper, size = buffers
    found = arena.place(*buffers, seconds=0.2)
    assert_valid(buffers, found)
    keys = [
        lambda i: -size[i],
        lambda i: lower[i] - upper[i],
        lambda i: size[i] * (lower[i] - upper[i]),
        lambda i: (lower[i], -size[i]),
    ]
    indices = range(len(size))
    assert found.height <= min(lowest_gaps(buffers, sorted(indices, key=key)) for key in keys)


@pytest.mark.parametrize("seed", range(12))
def test_of_few_buffers_no_order_is_better(seed: int) -> None:
    buffers = drawn(seed, 7, times=8, most=9)
    best = min(lowest_gaps(buffers, list(order)) for order in itertools.permutations(range(7)))
    found = arena.place(*buffers)
    assert found.height == best == found.bound and found.exact


@pytest.mark.parametrize("seed", range(4))
def test_a_square_in_pieces_is_put_together(seed: int) -> None:
    buffers = cut(seed, 60)
    found = arena.place(*buffers, capacity=1 << 12, seconds=20.0)
    assert_valid(buffers, found)
    assert found.fits and found.exact and found.height == 1 << 12


def test_a_training_step_of_many_buffers_is_at_the_bound() -> None:
    draw = random.Random(0)
    layers, rows = 400, []
    for layer in range(layers):
        forward, backward = 4 * layer, 8 * layers - 4 * layer
        rows.append((forward, backward, draw.randrange(1, 1 << 20)))  # saved for the backward
        rows += [(forward + n, forward + n + 2, draw.randrange(1, 1 << 20)) for n in (0, 1, 2)]
        rows += [(backward - n, backward - n + 2, draw.randrange(1, 1 << 20)) for n in (0, 1, 2)]
    lower, upper, size = (list(column) for column in zip(*rows, strict=True))
    found = arena.place(lower, upper, size, seconds=2.0)
    assert found.gap <= 0.002, found.gap


def test_alignment_and_pinned_offsets_are_kept() -> None:
    buffers = drawn(3, 30)
    found = arena.place(*buffers, alignment=64, pinned={4: 128, 7: 1024})
    assert_valid(buffers, found)
    assert found.offsets[4] == 128 and found.offsets[7] == 1024
    assert all(offset % 64 == 0 for offset in found.offsets)
    assert found.height >= 1024 + buffers[2][7]


def test_what_does_not_fit_is_said() -> None:
    buffers = cut(0, 400)
    found = arena.place(*buffers, capacity=1 << 12, seconds=0.0)
    assert_valid(buffers, found)
    assert not found.fits and not found.exact and found.gap > 0


def test_without_the_library_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "load", lambda: "it is not built")
    with pytest.raises(UnsupportedError, match=r"place: it needs the compiled library: it is"):
        arena.place(*drawn(5, 60))


def test_nothing_and_empty_buffers_have_places() -> None:
    assert arena.place([], [], []) == Placement((), 0, 0)
    assert arena.place([0, 0], [2, 2], [0, 8]).height == 8


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        (([0], [0], [4]), {}, r"upper\[0\] must be larger than lower\[0\], 0, got 0"),
        (([3], [1], [4]), {}, r"upper\[0\] must be larger"),
        (([0], [1], [-4]), {}, r"size\[0\] must be at least 0"),
        (([0], [1], [2**63]), {}, r"size\[0\] must be an int of 64 bits"),
        (([0, 0], [1, 1], [2**62, 2**62]), {}, r"2\*\*63"),
        (([0, 1], [1], [4]), {}, "of the length of size"),
        (([0, 0], [2, 2], [4, 4]), {"capacity": 7}, "capacity must be at least 8"),
        (([0], [1], [4]), {"alignment": 0}, "alignment must be at least 1"),
        (([0, 0], [1, 1], [4, 4]), {"pinned": {0: 0, 1: 2}}, r"apart from pinned\[0\]"),
        (([0], [1], [4]), {"pinned": {1: 0}}, "indices below 1"),
        (([0], [1], [4]), {"pinned": {0: 3}, "alignment": 2}, "a multiple of alignment"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: Buffers, options: dict[str, object], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        arena.place(*arguments, **options)  # type: ignore[arg-type]


def test_numbers_that_are_no_integers() -> None:
    with pytest.raises(TypeError, match=r"size\[0\]"):
        arena.place([0], [1], [4.5])  # type: ignore[list-item]


def test_the_command_prints_the_gap_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "buffers.csv"
    rows = zip(*drawn(1, 20), strict=True)
    lines = [f"b{i},{a},{b},{c}" for i, (a, b, c) in enumerate(rows)]
    file.write_text("\n".join(["id,lower,upper,size", *lines]))
    svg, record = tmp_path / "buffers.svg", tmp_path / "rows.json"
    app(
        ["bench", "arena", str(file), "--svg", str(svg), "--json", str(record)],
        standalone_mode=False,
    )
    text = " ".join(capsys.readouterr().out.split())
    assert "buffers.csv" in text and "block / bound" in text
    assert svg.read_text().count("<rect") >= 20
    (row,) = json.loads(record.read_text())["rows"]
    assert len(row["offsets"]) == 20 and row["block"] >= row["bound"]
    file.write_text("id,lower,upper\n1,2,3\n")
    with pytest.raises(SystemExit):
        app(["bench", "arena", str(file)], standalone_mode=False)
    assert "line 2: size must be an integer" in " ".join(capsys.readouterr().err.split())
