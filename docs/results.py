"""The measurements under ``bench/results`` as README.md and the pages show them."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusedops.bench import report as bench_report
from fusedops.bench import svg
from fusedops.bench.model_zoo import FAMILIES
from fusedops.bench.results import BenchRecord, load_json
from fusedops.specs import Spec

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = ("forward", "both")
MODES = ("training", "forward", "decoding 1", "decoding 4")
_WORDS = {"training": "training", "forward": "forward", "decoding": "generation"}
_PROCESSORS = {
    "cpu-xeon-amx": "Intel Xeon with AMX",
    "cpu-zen3": "AMD Zen 3",
    "cpu-zen4": "AMD Zen 4",
    "cpu-zen5": "AMD Zen 5",
}
SIZES = ("4x256", "1x256+32", "4x256+32")  # sequences x tokens, and generated ones

Row = dict[str, str]
# (dtype, direction, variant) -> the row of an op's first headline size
Headline = dict[tuple[str, str, str], Row]


def table(specs: Iterable[Spec]) -> str:
    """Return one line per op: the first headline size, ours against eager and torch.compile."""
    folder, headlines = _measured(specs)
    if folder is None:
        return "No measurement is committed yet."
    first = next(iter(next(iter(headlines.values())).values()))
    measured = {key[0] for rows in headlines.values() for key in rows}
    names = [each for each in DTYPES if each in measured]
    folders = sorted(path.name for path in RESULTS.glob("*") if path != folder and path.is_dir())
    others = ", ".join(f"`{name}`" for name in folders)
    lines = [
        f"{first['device_name']} ({folder.name}), {first['threads']} threads, torch "
        f"{first['torch']}, {first['allocator']} allocator on all sides; median of interleaved "
        "rounds, speed relative to eager (in brackets that of torch.compile; blank: not "
        "measured, or disturbed by other programs). "
        "All sizes and machines: [bench/results](../bench/results)"
        + (f" (also {others})." if others else "."),
        "",
        "| op | size | " + " | ".join(f"{dtype} | with backward" for dtype in names) + " |",
        "|---|---|" + "---:|---:|" * len(names),
    ]
    for op, rows in headlines.items():
        cells = []
        for dtype in names:
            for direction in DIRECTIONS:
                ours, compiled = _speedups(rows, dtype, direction)
                text = f"{ours:.2f}" if ours else ""
                cells.append(text + (f" ({compiled:.2f})" if ours and compiled else ""))
        if any(cells):
            size = next(iter(rows.values()))["case"]
            lines.append(f"| [`{op}`](ops/{op}.md) | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chart(specs: Iterable[Spec]) -> str:
    """Return an SVG of the bfloat16 speed-ups with backward: a bar per op and for its compile."""
    folder, headlines = _measured(specs)
    found = {op: _speedups(rows, "bfloat16", "both") for op, rows in headlines.items()}
    bars = sorted(((ours, other, op) for op, (ours, other) in found.items() if ours), reverse=True)
    where = folder.name if folder is not None else "nowhere"
    title = f"Speed relative to eager, bfloat16, forward and backward ({where})"
    return svg.bars(title, [svg.Bar(op, ours, other) for ours, other, op in bars])


def models_table() -> str:
    """Return the whole models' rows of each machine: times of the fastest other by ours."""
    blocks = []
    for record in _model_records():
        names = [dtype for dtype in DTYPES if any(row.dtype == dtype for row in record.rows)]
        threads = f", {record.machine['threads']} threads" if record.machine["threads"] else ""
        lines = [
            f"{record.machine['name']} ({record.machine['slug']}){threads}, torch "
            f"{record.versions['torch']}, {record.settings['allocator']} allocator on all sides: "
            "speed relative to stock in eager mode, and the quartiles.",
            "",
            f"| model | mode | {' | '.join(names)} |",
            "|---|---|" + "---:|" * len(names),
        ]
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for row in record.rows:
            if row.lead is not None and row.trusted:
                size = row.case.split(", ")[-1]
                rival = " `compile`" if row.rival == "compile" else ""
                spread = f"({row.lead_q1:.2f}-{row.lead_q3:.2f})"
                line = cells.setdefault((row.op, f"{row.direction} {size}"), {})
                line[row.dtype] = f"{row.lead:.2f} {spread}{rival}"
        lines += [
            f"| {model} | {mode} | {' | '.join(line.get(name, '') for name in names)} |"
            for (model, mode), line in cells.items()
        ]
        picture = (
            f"![Whole models on {record.machine['slug']}](models-{record.machine['slug']}.svg)"
        )
        blocks.append("\n".join([*lines, "", picture]))
    return "\n\n".join(blocks) or "No measurement is committed yet."


def models_summary() -> str:
    """Return a line per machine and dtype: means over families, extremes and their number.

    Only rows of ``SIZES`` count: in float16 on AMD some families were measured on fewer tokens.
    """
    columns = ("training", "forward", "generation, batch 1", "generation, batch 4", "measured")
    lines = [
        f"| processor | dtype of weights | {' | '.join(columns)} |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for record in _model_records():
        for dtype in DTYPES:
            leads: dict[str, list[float]] = {}
            for row in record.rows:
                size = row.case.split(", ")[-1]
                if row.dtype == dtype and row.lead is not None and row.trusted and size in SIZES:
                    sequences = size.split("x")[0]
                    alone = row.direction != "decoding"
                    mode = row.direction if alone else f"decoding {sequences}"
                    leads.setdefault(mode, []).append(row.lead)
            if not leads:
                continue
            cells = [_mean(leads.get(mode, [])) or "-" for mode in MODES]
            when = f"torch {record.versions['torch'].split('+')[0]}, {record.created[:10]}"
            cells = [_PROCESSORS[record.machine["slug"]], dtype, *cells, when]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "No measurement is committed yet."


def slower_table() -> str:
    """Return the whole models that the fastest other beats by more than 3 %."""
    lines = ["| processor | dtype | what | speed relative to stock |", "|---|---|---|---|"]
    for record in _model_records():
        groups: dict[tuple[str, str], list[str]] = {}
        for row in record.rows:
            if row.lead is not None and row.trusted and row.lead < 0.97:
                mode = f"{_WORDS[row.direction]}, {row.case.split(', ')[-1]} tokens"
                groups.setdefault((row.dtype, mode), []).append(f"{row.op} {row.lead:.2f}")
        lines += [
            f"| {_PROCESSORS[record.machine['slug']]} | {dtype} | {mode} | {', '.join(models)} |"
            for (dtype, mode), models in groups.items()
        ]
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    if not values:
        return ""
    mean = statistics.geometric_mean(values)
    return f"{mean:.2f} ({min(values):.2f}-{max(values):.2f}, n={len(values)})"


def model_charts() -> dict[str, str]:
    """Return a picture per machine, by the name of its file: rows of one dtype beside eager.

    That is bfloat16 where it was measured.
    """
    charts = {}
    for record in _model_records():
        trusted = [row for row in record.rows if row.trusted]
        dtype = min((row.dtype for row in trusted), default="")
        rows = tuple(row for row in trusted if row.dtype == dtype)
        name = f"models-{record.machine['slug']}.svg"
        charts[name] = bench_report.draw(replace(record, rows=rows))
    return charts


def _model_records() -> list[BenchRecord]:
    """Return one record per machine, with the rows of all of its files, in the families' order."""
    found = []
    for folder in sorted(each for each in RESULTS.glob("*") if each.is_dir()):
        records = [load_json(path) for path in sorted(folder.glob("models-*.json"))]
        rows = [row for record in records for row in record.rows]
        if rows:
            order = {name: number for number, name in enumerate(FAMILIES)}
            rows.sort(key=lambda row: order.get(row.op, len(order)))
            newest = max(record.created for record in records)
            found.append(replace(records[0], rows=tuple(rows), created=newest))
    return found


def libraries_table() -> str:
    """Return the training steps of other libraries' models on each machine, by dtype."""
    blocks = []
    for folder in sorted(path for path in RESULTS.glob("*") if list(path.glob("libraries-*.json"))):
        records = {}
        for dtype in ("bfloat16", "float32"):
            path = folder / f"libraries-{dtype}.json"
            if path.exists():
                records[dtype] = json.loads(path.read_text())
        first = next(iter(records.values()))
        heads = [f"{dtype}, {name}" for dtype in records for name in ("passes", "patched")]
        lines = [
            f"{first['machine']['name']} ({folder.name}), torch {first['versions']['torch']}:",
            "",
            f"| model | {' | '.join(heads)} |",
            "|---|" + "---:|" * len(heads),
        ]
        for row in first["rows"]:
            cells = []
            for record in records.values():
                match = next(
                    (each for each in record["rows"] if each["model"] == row["model"]), None
                )
                for name in ("passes", "patched"):
                    faster = match and match["right"] and match["times_faster"][name]
                    cells.append(f"{faster['median']:.2f}" if faster else "")
            lines.append(f"| {row['model']} | {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "No measurement is committed yet."


def types_table() -> str:
    """Return how much faster the training step of each model type is, by device, task and dtype."""
    blocks = []
    for folder in sorted(path for path in RESULTS.glob("*") if list(path.glob("types-*.json"))):
        lines = [
            "| task | dtype | types | slowest | quartiles | fastest |",
            "|---|---|---:|---|---:|---|",
        ]
        name = folder.name
        for path in sorted(folder.glob("types-*.json")):
            record: dict[str, Any] = json.loads(path.read_text())
            name = f"{record['name']} ({folder.name})"
            task, _, dtype = path.stem.removeprefix("types-").rpartition("-")
            rows = sorted((row["times_faster"]["median"], row["type"]) for row in record["rows"])
            ratios = [ratio for ratio, _ in rows]
            low, middle, high = statistics.quantiles(ratios, n=4)
            (slowest, first), (fastest, last) = rows[0], rows[-1]
            lines.append(
                f"| {task.replace('-', ' ')} | {dtype} | {len(rows)} | {slowest:.2f} ({first}) "
                f"| {low:.2f}, {middle:.2f}, {high:.2f} | {fastest:.2f} ({last}) |"
            )
        blocks.append("\n".join([f"{name}:", "", *lines]))
    return "\n\n".join(blocks) or "No measurement is committed yet."


def demo_table() -> str:
    """Return the speeds and loss differences of the committed runs of the demo."""
    blocks = []
    for path in sorted(RESULTS.glob("*/demo.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        lines = [
            f"{record['machine']['name']}, torch {record['versions']['torch']}: "
            f"GPT-2 architecture, {record['parameters'] / 1e6:.1f} M parameters, Python source:",
            "",
            "| model | dtype | allocator | tokens/s | speed-up |",
            "|---|---|---|---:|---:|",
        ]
        for row in record["rows"]:
            lines.append(
                f"| {row['model']} | {row['dtype']} | {row['allocator']} "
                f"| {row['tokens_per_second']:.0f} | {row['speed_up']:.2f} |"
            )
        for each in record["comparisons"]:
            lines.append("")
            lines.append(
                f"{each['dtype']}: largest relative loss difference to stock in the first 20 steps "
                f"{each['largest_loss_difference_first_20']:.1e}."
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "No run is committed yet."


def demo_line() -> str:
    """Return what the committed run of the demo gained, in a sentence."""
    path = RESULTS / "cpu-zen5" / "demo.json"
    record: dict[str, Any] = json.loads(path.read_text())
    gains = [
        f"{row['speed_up']:.2f} times as fast as stock in {row['dtype']}"
        for row in record["rows"]
        if row["model"] == "fusedops" and row["allocator"] == "tuned"
    ]
    size = f"{record['parameters'] / 1e6:.0f} M parameters"
    return (
        f"* **With AdamW** (`make demo`: GPT-2 of {size}, two Zen 5 cores): {gains[0]},\n"
        f"  {gains[1]} autocast."
    )


def trainer_table() -> str:
    """Return how much faster complete models train in transformers' Trainer, by machine."""
    blocks = []
    for path in sorted(RESULTS.glob("*/in_trainer.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        precisions = list(next(iter(record["cases"].values())))
        settings = record["settings"]
        lines = [
            f"{_PROCESSORS[record['machine']['slug']]}, {record['machine']['threads']} threads, "
            f"{settings['batch']} x {settings['tokens']} tokens, "
            f"torch {record['versions']['torch'].split('+')[0]}, "
            f"transformers {record['versions']['transformers']}, {record['created'][:10]}:",
            "",
            f"| model | {' | '.join(precisions)} |",
            "|---|" + "---:|" * len(precisions),
        ]
        for name, results in record["cases"].items():
            cells = [_trainer_cell(result) for result in results.values()]
            parameters = next(iter(results.values()))["parameters"] / 1e6
            lines.append(f"| {name} ({parameters:.0f} M) | {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "No run is committed yet."


def _trainer_cell(result: dict[str, Any]) -> str:
    """Return the speed-up, its extremes, and the speeds of both Trainers."""
    ratios, speeds = result["speed_ups"], result["tokens_per_second"]
    return (
        f"{result['speed_up']:.2f} ({min(ratios):.2f}-{max(ratios):.2f}): "
        f"{speeds['patched']:.0f} instead of {speeds['stock']:.0f} tokens/s"
    )


def trainer_summary() -> str:
    """Return the speed-ups of complete models in the Trainer, a line for each model."""
    record: dict[str, Any] = json.loads((RESULTS / "cpu-zen4" / "in_trainer.json").read_text())
    precisions = list(next(iter(record["cases"].values())))
    head = f"| complete models in the Trainer, with AdamW | {' | '.join(precisions)} |"
    lines = [head, "|---|" + "---:|" * len(precisions)]
    for name, results in record["cases"].items():
        cells = [f"{result['speed_up']:.2f}" for result in results.values()]
        parameters = next(iter(results.values()))["parameters"] / 1e6
        lines.append(f"| {name} ({parameters:.0f} M) | {' | '.join(cells)} |")
    return "\n".join(lines)


def products_table() -> str:
    """Return torch's products in half precision with and without ``fusedops.cpu``, by machine."""
    blocks = []
    for path in sorted(RESULTS.glob("*/torch_products-*.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        name = _PROCESSORS[record["machine"]["slug"].split("-as-")[0]]
        held = " held to AVX2" if record["isa"] == "avx2" else ""
        lines = [
            f"{name}{held}, {record['machine']['threads']} threads, "
            f"torch {record['versions']['torch'].split('+')[0]}, {record['created'][:10]}; "
            f"medians of {record['turns']} turns:",
            "",
            "| milliseconds (of float32) | float32, torch | bfloat16, torch |"
            " bfloat16, fusedops.cpu | float16, torch | float16, fusedops.cpu |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for case, results in record["cases"].items():
            cells = [f"{results['float32']['ms']['torch']:.2f}"]
            for dtype in ("bfloat16", "float16"):
                ms, share = results[dtype]["ms"], results[dtype]["of_float32"]
                ours = f"{ms['fusedops']:.2f} ({share:.2f})"
                cells += [
                    f"{ms['torch']:.2f}" if "torch" in ms else "-",
                    ours if dtype in record["replaced"] else "torch's",
                ]
            what, _, sizes = case.partition(",")
            lines.append(f"| `{what}`,{sizes} | {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def peers_table() -> str:
    """Return the times of CPU peers beside ours, a table for each machine and kind of work."""
    blocks = []
    for path in sorted(RESULTS.glob("*/peers.json")):
        kinds: dict[str, Any] = json.loads(path.read_text())["kinds"]
        for kind, part in kinds.items():
            contests: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for row in part["rows"]:
                contests.setdefault((row["work"], row["contest"]), []).append(row)
            blocks.append(
                f"### {_PEERS[kind]}\n\n{_PROCESSORS[path.parent.name]}, "
                f"{part['machine']['threads']} threads, {part['created'][:10]}:\n\n"
                "| work | peer | dtype | peer's time | ours | ratio (quartiles) | difference |\n"
                "|---|---|---|---:|---:|---:|---:|"
            )
            lines = [line for rows in contests.values() for line in _peer_lines(rows)]
            blocks[-1] += "\n" + "\n".join(lines)
    return "\n\n".join(blocks) or "No measurement is committed yet."


_PEERS = {
    "loss": "Loss heads",
    "layers": "Layers in inference",
    "encoders": "Encoders",
    "decoders": "Generation",
    "lora": "Training with quantised weights",
}


def _peer_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of one contest: a peer each, without the way of ours that all meet."""
    by_way = {row["way"]: row for row in rows}
    lines = []
    for row in rows:
        own = by_way[row["ours"]]
        if row is own:
            continue
        peer = row["way"] + (f" ({row['version']})" if "version" in row else "")
        dtype = row["dtype"] + (f", ours {own['dtype']}" if own["dtype"] != row["dtype"] else "")
        cells = [row["work"], peer, dtype]
        if "reason" in row:
            lines.append(f"| {' | '.join(cells)} | {row['reason']} | {_peer_time(own)} | | |")
            continue
        ratio, shown = row.get("ratio"), ""
        if ratio is not None:
            shown = f"{ratio['median']:.2f}"
            if ratio["count"] > 2:
                shown += f" ({ratio['q1']:.2f}-{ratio['q3']:.2f})"
        cells += [_peer_time(row), _peer_time(own), shown, f"{row['difference']:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _peer_time(row: dict[str, Any]) -> str:
    """Return the median: tokens per second where tokens are generated; ``?``: disturbed."""
    if "seconds" not in row:
        return row.get("reason", "")
    seconds, doubt = row["seconds"]["median"], "" if row["undisturbed"] else " ?"
    if row["tokens"]:
        return f"{row['tokens'] / seconds:.1f} tokens/s{doubt}"
    milliseconds = seconds * 1e3
    return f"{milliseconds:{'.0f' if milliseconds >= 100 else '.3g'}} ms{doubt}"


def encoders_table() -> str:
    """Return the times of encoders beside ONNX Runtime and OpenVINO, by machine."""
    blocks = []
    for path in sorted(RESULTS.glob("*/encode_queries.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        versions = record["versions"]
        names = [name for name in ("onnxruntime", "openvino") if name in versions]
        peers = ", ".join(f"{name} {versions[name].split('-')[0]}" for name in names)
        columns = ["stock", "fusedops", *names]
        lines = [
            f"{_PROCESSORS[record['machine']['slug']]}, {record['machine']['threads']} threads, "
            f"torch {versions['torch'].split('+')[0]}, transformers {versions['transformers']}, "
            f"{peers}, {record['created'][:10]}; milliseconds, and behind each other program its "
            "time divided by that of fusedops:",
            "",
            f"| encoder | sequences x tokens | {' | '.join(columns)} |",
            "|---|---|" + "---:|" * len(columns),
        ]
        for row in record["rows"]:
            cells = [_encoder_cell(row["variants"], name) for name in columns]
            sizes = f"{row['batch']} x {row['seq_len']}"
            lines.append(f"| {row['encoder']}, {row['dtype']} | {sizes} | {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "No run is committed yet."


def _encoder_cell(variants: dict[str, Any], name: str) -> str:
    """Return the median of a program and its ratio; ``?`` where other work disturbed it."""
    if name not in variants:
        return "-"
    result = variants[name]
    milliseconds = f"{result['seconds']['median'] * 1e3:.1f}"
    ratio = "" if name == "fusedops" else f" ({result['ratio']['median']:.2f})"
    return milliseconds + ratio + ("" if result["undisturbed"] else " ?")


def share_of_limit(share: str) -> str:
    """Return the share of the machine's limit in percent; empty where that is no limit.

    A limit is measured with torch's own products: where these are slow, ours are several times as
    fast. What stays in the cache may exceed the limit of memory by less.
    """
    return f"{float(share):.0%}" if share and float(share) <= 2 else ""


def trusted(row: Row) -> bool:
    """Return whether neighbours on the machine left enough of the row's samples undisturbed."""
    return row["trusted"] == "True"


def _measured(specs: Iterable[Spec]) -> tuple[Path | None, dict[str, Headline]]:
    """Return the folder of the machine with the most figures, and op -> its headline rows."""
    folders = [each for each in sorted(RESULTS.glob("*")) if list(each.glob("*-*.csv"))]
    if not folders:
        return None, {}
    folder = max(folders, key=lambda each: len(list(each.glob("*-*.csv"))))
    headlines: dict[str, Headline] = {}
    for spec in specs:
        case = next((case.label for case in spec.bench_cases if case.headline), None)
        paths = (folder / f"{spec.name}-{dtype}.csv" for dtype in DTYPES)
        rows = [row for path in paths if path.exists() for row in csv.DictReader(path.open())]
        found = {
            (row["dtype"], row["direction"], row["variant"]): row
            for row in rows
            if row["case"] == case
        }
        if found:
            headlines[spec.name] = found
    return folder, headlines


def _speedups(rows: Headline, dtype: str, direction: str) -> tuple[float | None, float | None]:
    """Return the speed-ups of fusedops and of torch.compile over eager; ``None`` for untrusted."""
    found = (rows.get((dtype, direction, variant)) for variant in ("fusedops", "compile"))
    ours, compiled = (float(row["speedup"]) if row and trusted(row) else None for row in found)
    return ours, compiled
