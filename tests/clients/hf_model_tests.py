"""Run transformers' own model tests on stock and on patched models, and compare test by test.

    python tests/clients/hf_model_tests.py --families llama,bert
    python tests/clients/hf_model_tests.py --tests PATH_TO_A_CHECKOUT_OF_TRANSFORMERS

With a checkout, the test files of the families run as they stand, generation included. Without one,
pip fetches the source archive of the transformers that is installed; that has the tests which all
models share, and ``hf_model_families.py`` gives them the families. Nothing of either comes into
this repository. The exit code is 1 if a test that passes stock does not pass patched and
``KNOWN`` does not say why.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path += [str(HERE), str(HERE.parent / "integrations")]

from hf_model_families import FAMILIES  # noqa: E402

NO_TESTS_COLLECTED = 5  # pytest's exit code
# What the shared tests import and the source archive lacks.
ABSENT = {
    "tests/generation/test_utils.py": "GenerationTesterMixin",
    "tests/exporters/test_export.py": "ExportTesterMixin",
}


class Known(NamedTuple):
    """A difference that is understood.

    Attributes:
        test: pattern of test ids (``fnmatch``).
        failure: what its failure says; another failure of the same test is new.
        reason: why the test fails on a patched model.
    """

    test: str
    failure: str
    reason: str

    def covers(self, test: str, failure: str) -> bool:
        return fnmatch.fnmatchcase(test, self.test) and self.failure in failure


KNOWN = [
    Known(
        "*::test_eager_matches_batched_and_grouped_inference_*_[bf]?16",
        "Tensor-likes are not close",
        "In half precision it wants eager experts, which are fused, and transformers' others, "
        "which are not, within 1e-4: less than one rounding.",
    )
]


@dataclass
class Comparison:
    """What a family's tests did, stock and patched.

    Attributes:
        passed_stock: how many passed.
        passed_patched: how many of them passed patched.
        with_fused_ops: how many of those ran a fused op.
        known: what passes stock and fails patched, with the reason from the list.
        new: the same without a known reason, with the failure.
        ops: calls of fused ops in the patched run, by op.
    """

    passed_stock: int = 0
    passed_patched: int = 0
    with_fused_ops: int = 0
    known: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)
    ops: Counter[str] = field(default_factory=Counter)


def compare(
    stock: dict[str, dict[str, Any]], patched: dict[str, dict[str, Any]], known: list[Known] = KNOWN
) -> Comparison:
    """Compare outcomes by test id; a test that did not run patched has failed."""
    result = Comparison()
    for outcome in patched.values():
        result.ops.update(outcome.get("ops", {}))
    for test, outcome in stock.items():
        if outcome["outcome"] != "passed":
            continue
        result.passed_stock += 1
        other = patched.get(test, {"outcome": "not run"})
        if other["outcome"] == "passed":
            result.passed_patched += 1
            result.with_fused_ops += bool(other["ops"])
            continue
        failure = f"{other['outcome']}: {other.get('reason', '')}"
        reasons = [each.reason for each in known if each.covers(test, failure)]
        if reasons:
            result.known[test] = reasons[0]
        else:
            result.new[test] = failure
    return result


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Read a run's file: the last line of a test holds, calls of ops are added.

    A test that starts a pytest of its own has lines from both.
    """
    outcomes: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        before = outcomes.get(entry["test"], {}).get("ops", {})
        entry["ops"] = dict(Counter(before) + Counter(entry.get("ops", {})))
        outcomes[entry["test"]] = entry
    return outcomes


def fetch(folder: Path) -> Path:
    """Return the unpacked tests of the installed transformers, with a file per family added."""
    version = importlib.metadata.version("transformers")
    tree = folder / f"transformers-{version}"
    if not tree.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        command += [":all:", "--no-build-isolation", "--dest", str(folder)]
        if subprocess.run([*command, f"transformers=={version}"]).returncode:
            raise SystemExit("pip found no source archive: give a checkout with --tests")
        with tarfile.open(folder / f"{tree.name}.tar.gz") as archive:
            tests = [each for each in archive if each.name.startswith(f"{tree.name}/tests/")]
            archive.extractall(folder, members=tests, filter="data")
    for path, mixin in ABSENT.items():
        if not (tree / path).exists():
            write(tree / path, f"class {mixin}:\n    pass\n")
    for family in FAMILIES:
        source = "from hf_model_families import classes_of\n\n"
        write(tree / test_file(family), f'{source}globals().update(classes_of("{family}"))\n')
    for each in (tree / "tests").rglob("*.py"):
        (each.parent / "__init__.py").touch()
    (tree / "tests" / "models" / "__init__.py").touch()
    return tree


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_file(family: str) -> str:
    return f"tests/models/{family}/test_modeling_{family}.py"


def run(
    tree: Path,
    family: str,
    *,
    patched: bool,
    outcomes: Path,
    select: str | None,
    limit: float,
    level: str = "O2",
) -> dict[str, dict[str, Any]]:
    """Run a family's tests in a process of its own and return the outcomes by test id."""
    outcomes.unlink(missing_ok=True)
    # By the environment, because some tests start a pytest of their own.
    options = f"-p hf_model_plugin --rootdir {tree} --outcomes {outcomes}"
    options += f" --patched --level {level}" if patched else ""
    paths = [HERE, HERE.parent / "integrations", ROOT, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTEST_ADDOPTS": options,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += [test_file(family), "-m", "not slow"] + (["-k", select] if select else [])
    log = outcomes.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"{family}: stopped after {limit:g} s, see {log}", file=sys.stderr)
    found = read_outcomes(outcomes)
    # A family whose file has only slow tests, or none that --select takes, is no mistake.
    if not found and process.returncode != NO_TESTS_COLLECTED:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        raise SystemExit(f"{family}: no test ran\n{tail}")
    return found


def table(results: dict[str, Comparison]) -> str:
    """Return the counts per family, as Markdown."""
    head = "| family | pass stock | of these pass patched | of these run fused ops | known | new |"
    lines = [head, "|---|---|---|---|---|---|"]
    for family, result in results.items():
        counts = (
            result.passed_stock,
            result.passed_patched,
            result.with_fused_ops,
            len(result.known),
        )
        lines.append(f"| {family} | {' | '.join(map(str, counts))} | {len(result.new)} |")
    return "\n".join(lines)


def report(results: dict[str, Comparison], tests: str, level: str) -> dict[str, Any]:
    """Return what ``--report`` writes."""
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    families = {family: vars(result) for family, result in results.items()}
    return versions | {"level": level, "tests": tests, "families": families}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tests", type=Path, help="checkout of transformers; default: pip's")
    parser.add_argument("--families", default=",".join(FAMILIES), help="by comma; default: all")
    parser.add_argument("--select", help="only tests that match, as pytest's -k")
    parser.add_argument("--level", default="O2", help="level at which models are patched")
    parser.add_argument("--limit", type=float, default=3600, help="seconds per family and run")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "hf_model_tests")
    parser.add_argument("--report", type=Path, help="JSON file to write")
    chosen = parser.parse_args()
    chosen.families = chosen.families.split(",")
    unknown = set(chosen.families) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    if chosen.tests and not (chosen.tests / "tests" / "test_modeling_common.py").exists():
        parser.error(f"{chosen.tests} is no checkout of transformers: it has no tests")
    return chosen


def main() -> int:
    chosen = arguments()
    if importlib.util.find_spec("parameterized") is None:
        raise SystemExit("transformers' tests need one more package: pip install parameterized")
    chosen.work.mkdir(parents=True, exist_ok=True)
    tree = (chosen.tests or fetch(chosen.work)).resolve()
    results: dict[str, Comparison] = {}
    for family in chosen.families:
        runs = []
        for name in ("stock", "patched"):
            outcomes = chosen.work.resolve() / f"{family}.{name}.jsonl"
            options = {"select": chosen.select, "limit": chosen.limit, "outcomes": outcomes}
            options["level"] = chosen.level
            runs.append(run(tree, family, patched=name == "patched", **options))
        results[family] = compare(*runs)
        for test, reason in results[family].new.items():
            print(f"NEW {test}\n    {reason}", flush=True)
        print(table({family: results[family]}).splitlines()[-1], flush=True)
        if chosen.report:
            own = "shared tests, tests/clients/hf_model_families.py"
            found = report(results, tree.name if chosen.tests else own, chosen.level)
            chosen.report.write_text(json.dumps(found, indent=1) + "\n")
    print(table(results))
    return int(any(result.new for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
