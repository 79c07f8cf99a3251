"""Fit the constants of the planner's clock on tables of measured steps, and say what is left.

    python tools/fit_clock.py steps.csv one_node.csv=a100-40 --gpu A100,A800,V100 --write efficiency
    python tools/fit_clock.py steps.csv --gpu H100,H200 --names float8,node --write h100

A file may be followed by the device of rows that have none. All files weigh alike.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from fusedops.planner import evaluation
from fusedops.planner.calibration import Step, calibrate
from fusedops.planner.device import FOLDER, load_device

SOURCE = "# By tools/fit_clock.py on published steps; docs/planning.md says which were fitted.\n"


def main() -> None:
    """Fit, print the errors, and write the files that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", help="FILE.csv or FILE.csv=DEVICE")
    parser.add_argument("--gpu", default="", help="beginnings of the rows' gpu, by ,")
    parser.add_argument("--exclude", default="", help="sources that are not fitted, by ;")
    parser.add_argument("--start", default="a100-80", help="device with the first constants")
    parser.add_argument("--names", default="", help="constants that are fitted, by ,")
    parser.add_argument("--keep", default="", help="constants that are not, by ,")
    parser.add_argument("--write", default="", help="files of devices/ that get them, by ,")
    arguments = parser.parse_args()
    steps: list[Step] = []
    weights: list[float] = []
    prefixes = tuple(arguments.gpu.split(","))
    for text in arguments.files:
        name, _, device = text.partition("=")
        usual = load_device(device) if device else None
        rows = [
            row
            for row in evaluation.load_rows(name)
            if row.get("source") not in arguments.exclude.split(";")
            and (row.get("gpu") or prefixes[0]).startswith(prefixes)
        ]
        mine = evaluation.measured_steps(rows, usual)
        steps += mine
        weights += [(300 / max(1, len(mine))) ** 0.5] * len(mine)
    start = load_device(arguments.start).efficiency
    names = arguments.names.split(",") if arguments.names else list(asdict(start))
    names = [name for name in names if name not in arguments.keep.split(",")]
    fitted = asdict(calibrate(steps, start, names=names, weights=weights))
    lines = [f"{name} = {fitted[name]:.4g}\n" for name in names]
    print("".join(lines), end="")
    for stem in filter(None, arguments.write.split(",")):
        path = FOLDER / f"{stem}.toml"
        if stem == "efficiency":
            path.write_text(SOURCE + "".join(f"{name} = {fitted[name]:.4g}\n" for name in fitted))
            continue
        before = path.read_text().partition("\n[efficiency]")[0]
        path.write_text(f"{before}\n[efficiency]\n{SOURCE}{''.join(lines)}")


if __name__ == "__main__":
    main()
