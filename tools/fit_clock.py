"""Fit the constants of the planner's clock on tables of measured steps, and say what is left.

    python tools/fit_clock.py steps.csv one_node.csv=a100-40 --gpu A100,A800,V100 --write efficiency
    python tools/fit_clock.py steps.csv --gpu H100 --names float8,ring --write h100 --layers h100
    python tools/fit_clock.py steps.csv one_node.csv=a100-40 --gpu A100,H100 --validate

A file may be followed by the device of rows that have none. All files weigh alike.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import asdict, replace

from fusedops.cli.plan_evaluate import layers_toml
from fusedops.planner import evaluation
from fusedops.planner.calibration import Step, calibrate, measured_layers
from fusedops.planner.device import (
    FOLDER,
    Device,
    DeviceEfficiency,
    MeasuredLayer,
    load_device,
)
from fusedops.planner.step_time import step_time

SOURCE = "# By tools/fit_clock.py on published steps; docs/estimates.md says which were fitted.\n"
# What a measured layer tells as well: these are fitted without such layers, the others with them.
OF_LAYERS = (
    *("products", "float8", "attention", "inner", "outer", "elementwise", "node"),
    *("collective_seconds", "expert_seconds", "host_seconds", "host_spread"),
)
ROUNDS = 2
# Of a validation: random halves, and layouts of a half from which on they are ranked.
HALVES, LEAST_RANKED = 12, 8


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
    parser.add_argument(
        "--validate",
        action="store_true",
        help="layers measured on one half of the rows, errors of the other",
    )
    parser.add_argument("--layers", default="", help="files that get the measured layers, by ,")
    arguments = parser.parse_args()
    steps: list[Step] = []
    weights: list[float] = []
    sources: list[tuple[str, str]] = []
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
        sources += [
            (row.get("source") or name, evaluation.group_of(row))
            for row in rows
            if evaluation.measured_steps([row], usual)
        ]
        weights += [(300 / max(1, len(mine))) ** 0.5] * len(mine)
    if arguments.validate:
        validate(steps, sources)
        return
    start = load_device(arguments.start).efficiency
    names = arguments.names.split(",") if arguments.names else list(asdict(start))
    names = [name for name in names if name not in arguments.keep.split(",")]
    usual = calibrate(unmeasured(steps), start, names=names, weights=weights)
    rest = [name for name in names if name not in OF_LAYERS]
    for _ in range(ROUNDS if rest else 0):
        usual = calibrate(with_layers(steps, usual), usual, names=rest, weights=weights)
    fitted = asdict(usual)
    lines = [f"{name} = {fitted[name]:.4g}\n" for name in names]
    print("".join(lines), end="")
    for stem in filter(None, arguments.write.split(",")):
        path = FOLDER / f"{stem}.toml"
        if stem == "efficiency":
            path.write_text(SOURCE + "".join(f"{name} = {fitted[name]:.4g}\n" for name in fitted))
            continue
        before, _, own = path.read_text().partition("\n[efficiency]\n")
        others = [
            line + "\n"
            for line in own.splitlines()
            if " = " in line and line.split(" = ")[0] not in names
        ]
        path.write_text(f"{before}\n[efficiency]\n{SOURCE}{''.join(others + lines)}")
    for stem in filter(None, arguments.layers.split(",")):
        write_layers(stem, steps, usual)


def validate(steps: list[Step], sources: list[tuple[str, str]]) -> None:
    """Print errors and rankings of the half of all rows that measured no layers, on average.

    Args:
        steps: measured ones.
        sources: of each step, its source and its group of layouts that are compared.
    """
    chosen = random.Random(0)
    indices = list(range(len(steps)))
    errors: dict[str, list[tuple[float, float]]] = {}
    rankings: dict[str, list[tuple[float, float]]] = {}
    for _ in range(HALVES):
        chosen.shuffle(indices)
        half = len(indices) // 2
        known, rest = indices[:half], indices[half:]
        layers = layers_by_family([steps[index] for index in known])
        groups: dict[str, list[tuple[float, float]]] = {}
        for index in rest:
            shape, device, seconds = steps[index]
            plain, measured = (
                step_time(shape, replace(device, layers=which)).seconds
                for which in ((), layers.get(family(device), ()))
            )
            source, group = sources[index]
            shares = abs(plain / seconds - 1), abs(measured / seconds - 1)
            errors.setdefault(source, []).append(shares)
            groups.setdefault(group, []).append((measured, seconds))
        for group, pairs in groups.items():
            if len(pairs) >= LEAST_RANKED:
                best, first = min(seconds for _, seconds in pairs), min(pairs)[1]
                rank = evaluation.kendall_tau(pairs), first / best - 1
                rankings.setdefault(group, []).append(rank)
    for source, values in sorted(errors.items()):
        plain, measured = (statistics.fmean(part) for part in zip(*values, strict=True))
        print(f"{source}: {plain:.1%} without layers, {measured:.1%} with those of other rows")
    for group, values in sorted(rankings.items()):
        tau, slower = (statistics.fmean(part) for part in zip(*values, strict=True))
        print(f"{group}: Kendall's tau {tau:.2f}, the first choice {slower:.1%} slower")


def layers_by_family(steps: list[Step]) -> dict[str, tuple[MeasuredLayer, ...]]:
    """Return the layers that steps measure on devices with their own efficiencies."""
    efficiencies = {family(device): device.efficiency for _, device, _ in steps}
    return {
        name: tuple(measured_layers(of_family(steps, name), efficiency))
        for name, efficiency in efficiencies.items()
    }


def unmeasured(steps: list[Step]) -> list[Step]:
    """Return the steps on devices of which no layer was measured."""
    return [(shape, replace(device, layers=()), seconds) for shape, device, seconds in steps]


def with_layers(steps: list[Step], usual: DeviceEfficiency) -> list[Step]:
    """Return the steps on devices with the layers that steps on their family measure."""
    families = {family(device) for _, device, _ in steps}
    layers = {name: tuple(measured_layers(of_family(steps, name), usual)) for name in families}
    return [
        (shape, replace(device, layers=layers[family(device)]), seconds)
        for shape, device, seconds in steps
    ]


def of_family(steps: list[Step], name: str) -> list[Step]:
    """Return the steps on a family of devices, which differ in memory only."""
    return [step for step in steps if family(step[1]) == name]


def family(device: Device) -> str:
    """Return maker and model of a device, for example ``"NVIDIA A100"``."""
    return " ".join(device.name.split()[:2])


def write_layers(stem: str, steps: list[Step], usual: DeviceEfficiency) -> None:
    """Write the layers that steps on a device's family measured into the device's file."""
    device = load_device(stem)
    mine = [
        (shape, replace(other, memory=device.memory, peak=device.peak), seconds)
        for shape, other, seconds in of_family(steps, family(device))
    ]
    path = FOLDER / f"{stem}.toml"
    before, _, after = path.read_text().partition("\n[memory]")
    head = before.partition("layers = [")[0]
    text = "\n".join(layers_toml(measured_layers(mine, usual)))
    path.write_text(f"{head}{text}\n\n[memory]{after}")


if __name__ == "__main__":
    main()
