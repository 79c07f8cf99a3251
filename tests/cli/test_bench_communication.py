"""``fusedops bench communication``: checked data, bandwidths by their definition, slow links."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from fusedops.bench import communication as bench
from fusedops.cli.bench import communication_rows as command
from fusedops.launch.processes import Ranks
from fusedops.parallel.comm import collectives
from fusedops.planner.communication import CommunicationModel
from fusedops.terminal.files import UserError

FACTORS = {"all_reduce": 1.5, "broadcast": 1.0, "send_receive": 1.0}


def _ranks() -> Ranks:
    store = dist.distributed_c10d._get_default_store()
    return Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), store)


def _measured(_: Any) -> tuple[list[bench.CommunicationRow], list[bench.LinkRow]]:
    ranks, said = _ranks(), []
    rows = bench.measure(
        ranks, ["gloo"], list(bench.COLLECTIVES), [1 << 10, 1 << 14], 1e-4, said.append
    )
    assert said == [f"gloo, {name}" for name in bench.COLLECTIVES]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collectives.Pending, "wait", _altered(collectives.Pending.wait))
        rows += bench.measure(ranks, ["gloo"], ["all_gather"], [1 << 10], 1e-4, said.append)
    return rows, bench.links(ranks, "gloo", 1 << 10, repeats=1)


def _altered(wait: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    def altered(pending: Any) -> torch.Tensor:
        result = wait(pending)
        result[..., -1:] += 1
        return result

    return altered


def test_rows_follow_the_conventions_and_wrong_data_is_counted(
    on_ranks: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (*rows, wrong), links = on_ranks(_measured)[0]
    assert [row.collective for row in rows[::2]] == list(bench.COLLECTIVES)
    for row in rows:
        assert (row.ranks, row.nodes, row.wrong) == (8, 1, 0)
        assert row.min_us <= row.avg_us <= row.max_us
        assert row.algbw == pytest.approx(row.bytes / row.avg_us * 1e6)
        factor = 2 * 7 / 8 if row.collective == "all_reduce" else FACTORS.get(row.collective, 7 / 8)
        assert row.busbw == pytest.approx(row.algbw * factor)
        if row.collective != "all_to_all_uneven":
            assert row.bytes in (1 << 10, 1 << 14)
    assert wrong.wrong == 8  # one element on each rank
    files = tmp_path / "links.json", tmp_path / "links.svg"
    ranks = Ranks(0, 8, torch.device("cpu"), None)
    command.deliver(rows, links, ranks, *files)
    assert_the_planner_reads(*files)
    shown = capsys.readouterr().out
    assert "28 pairs of ranks" in shown and "latency us" in shown
    with pytest.raises(UserError, match="the first is all_gather by gloo of 1024 bytes: 8 elem"):
        command.deliver([*rows, wrong], links, ranks, None, None)


def assert_the_planner_reads(json_file: Path, svg_file: Path) -> None:
    record = json.loads(json_file.read_text())
    assert {row["backend"] for row in record["rows"]} >= {"gloo"}
    curves = CommunicationModel.load(json_file).curves
    ranks = str(record["rows"][0]["ranks"])
    assert curves["all_reduce", "gloo", ranks].seconds(1 << 14) > 0
    assert svg_file.read_text().count("<polyline") == len(curves)


@pytest.mark.parametrize("ranks", range(2, 10))
def test_rounds_hold_each_pair_once(ranks: int) -> None:
    rounds = bench.rounds(ranks)
    assert len(rounds) == ranks - 1 + ranks % 2
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))
    assert sorted(sum(rounds, [])) == list(itertools.combinations(range(ranks), 2))


def test_a_slow_link_is_one_among_links_of_its_kind() -> None:
    hosts = ["a", "a", "b", "b"]
    fast, network = {(0, 1), (2, 3)}, 1e9
    pairs = [
        (first, second, 5e10 if (first, second) in fast else network)
        for first, second in itertools.combinations(range(4), 2)
    ]
    assert not any(row.slow for row in bench.mark_slow(pairs, hosts))
    pairs[2] = (0, 3, 0.5e9)
    slowest, *rest = bench.mark_slow(pairs, hosts)
    assert (slowest.first, slowest.second, slowest.hosts) == (0, 3, ("a", "b")) and slowest.slow
    assert not any(row.slow for row in rest)
    # As many links of either kind: the median of all lies between both.
    hosts = ["a", "a", "a", "b"]
    pairs = [(one, two, network if two == 3 else 5e10) for one, two, _ in pairs]
    assert not any(row.slow for row in bench.mark_slow(pairs, hosts))


@pytest.mark.slow
def test_the_command_writes_what_the_planner_reads(tmp_path: Path) -> None:
    files = tmp_path / "links.json", tmp_path / "links.svg"
    words = [sys.executable, "-m", "fusedops", "bench", "communication", "--seconds", "0.01"]
    words += ["--collectives", "all_reduce,all_to_all_uneven", "--least", "4KiB"]
    words += ["--most", "64KiB", "--links", "--json", str(files[0]), "--svg", str(files[1])]
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "1 pairs of ranks" in done.stdout and "latency us" in done.stdout
    assert_the_planner_reads(*files)
