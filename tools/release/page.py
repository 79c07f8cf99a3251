"""Writes docs/compatibility.md: which Pythons and torches the wheels were tried with.

PYTHONPATH=tools python -m release.page    # from docs/reports/compatibility.json again
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "reports" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
TEXT = Path(__file__).with_name("compatibility.md.in")


def record(rows: list[dict[str, Any]], files: list[dict[str, Any]]) -> None:
    """Write the results of a run, and the page; earlier ones of the same files are kept."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if before.get("files") == files:
        own = {(row["asked_torch"], row["asked_python"]) for row in rows}
        others = [
            row for row in before["rows"] if (row["asked_torch"], row["asked_python"]) not in own
        ]
        rows = sorted([*others, *rows], key=lambda row: (row["asked_torch"], row["asked_python"]))
    machine = f"{_processor()}, {platform.platform()}"
    results = {"machine": machine, "files": files, "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))
    print(f"wrote {PAGE.relative_to(ROOT)}", flush=True)


def page(results: dict[str, Any]) -> str:
    """Return the page for results."""
    text = TEXT.read_text()
    for name, made in (
        ("FILES", _files(results["files"])),
        ("MATRIX", _matrix(results["rows"])),
        ("IMPORT", _import(results["rows"])),
        ("MACHINE", results["machine"]),
    ):
        text = text.replace(f"@{name}@", made)
    return text


def _files(files: list[dict[str, Any]]) -> str:
    lines = [
        "| file | size | installed | torch | instruction sets |",
        "|---|---:|---:|---|---|",
    ]
    for row in files:
        installed = f"{row['installed'] / 1e6:.1f} MB" if "installed" in row else ""
        torches = ", ".join(name.removeprefix("torch-") for name in row.get("torches", []))
        sets = row.get("isas", "").replace(",", ", ")
        size = f"{row['bytes'] / 1e6:.1f} MB"
        lines.append(f"| `{row['name']}` | {size} | {installed} | {torches} | {sets} |")
    return "\n".join(lines)


def _matrix(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| torch | Python | glibc | smoke test | doctor | kernels | largest difference |",
        "|---|---|---|---|---|---|---:|",
    ]
    missing: dict[tuple[str, str], list[str]] = {}  # Python and reason -> torches
    for row in rows:
        if "libc" not in row:
            why = (row.get("error") or row["left_out"]).split("\n")[0]
            missing.setdefault((row["asked_python"], why), []).append(row["asked_torch"])
            continue
        difference = f"{max(row['op'], row['model']):.1e}"
        libc = row["libc"].removeprefix("glibc ")
        lines.append(
            f"| {row['torch']} | {row['python']} | {libc} | passed | {row['doctor']} | "
            f"{row['kernels']} | {difference} |"
        )
    for (python, why), torches in missing.items():
        lines.append(f"| {', '.join(torches)} | {python} | | {why} | | | |")
    return "\n".join(lines)


def _processor() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _import(rows: list[dict[str, Any]]) -> str:
    times = [(row["fusedops_s"], row["torch_s"]) for row in rows if "fusedops_s" in row]
    if not times:
        return ""
    own, torch = (sorted(column)[len(times) // 2] for column in zip(*times, strict=True))
    return (
        f"`import fusedops` takes {own:.2f} s of processor time after `import torch`, which takes\n"
        f"{torch:.2f} s (medians of the rows above, of which each is the fastest of three)."
    )


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
