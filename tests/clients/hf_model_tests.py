"""Run transformers' own model tests on stock and on patched models, and compare test by test.

    python tests/clients/hf_model_tests.py --families llama,bert
    python tests/clients/hf_model_tests.py --tests PATH_TO_A_CHECKOUT_OF_TRANSFORMERS

The test files of the families run as they stand, generation included. Without ``--tests``, git
fetches the release of transformers that is installed. Nothing of it comes into this repository.
The exit code is 1 if a test that passes stock does not pass patched and ``KNOWN`` does not say why.
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NO_TESTS_COLLECTED = 5  # pytest's exit code
# Names of their folders in transformers.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3", "gpt_neox"),
    *("opt", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "gpt2"),
    *("bert", "electra", "roberta", "xlm_roberta", "camembert", "distilbert", "vit", "clip", "t5"),
    *("whisper", "granite", "olmo", "olmo2", "olmo3", "smollm3", "cohere", "cohere2", "stablelm"),
    *("starcoder2", "nemotron", "exaone4", "glm", "glm4", "helium", "ministral", "granitemoe"),
    *("falcon", "bloom", "persimmon", "qwen3_next", "mpt", "gpt_bigcode", "gptj", "codegen"),
    *("modernbert", "mpnet", "albert", "roformer", "deberta", "deberta_v2", "bart", "mbart"),
    *("marian", "pegasus", "m2m_100", "blenderbot", "deit", "beit", "dinov2", "swin", "segformer"),
    *("siglip", "wav2vec2", "hubert"),
)


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

    def __str__(self) -> str:
        failures = f"{len(self.known)} known and {len(self.new)} new failures"
        return (
            f"{self.passed_stock} tests pass stock, {self.passed_patched} of these patched, "
            f"{self.with_fused_ops} with fused ops; {failures}"
        )


def compare(stock: dict[str, dict[str, Any]], patched: dict[str, dict[str, Any]]) -> Comparison:
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
        reasons = [each.reason for each in KNOWN if each.covers(test, failure)]
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
    """Return a checkout of the installed transformers."""
    version = importlib.metadata.version("transformers")
    tree = folder / f"transformers-{version}"
    if not tree.exists():
        clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{version}"]
        command = [*clone, "https://github.com/huggingface/transformers", str(tree)]
        if subprocess.run(command).returncode:
            raise SystemExit("git found no such release: give a checkout with --tests")
    return tree


def test_file(family: str) -> str:
    return f"tests/models/{family}/test_modeling_{family}.py"


def run(
    tree: Path,
    family: str,
    *,
    patched: bool,
    outcomes: Path,
    limit: float,
    level: str = "O2",
) -> dict[str, dict[str, Any]]:
    """Run a family's tests in a process of its own and return the outcomes by test id."""
    outcomes.unlink(missing_ok=True)
    # By the environment, because some tests start a pytest of their own.
    options = f"-p hf_model_plugin --rootdir {tree} --outcomes {outcomes}"
    options += f" --patched --level {level}" if patched else ""
    paths = [HERE, ROOT, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTEST_ADDOPTS": options,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += [test_file(family), "-m", "not slow"]
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
    # A family whose file has only slow tests is no mistake.
    if not found and process.returncode != NO_TESTS_COLLECTED:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        raise SystemExit(f"{family}: no test ran\n{tail}")
    return found


def report(results: dict[str, Comparison], tests: str, level: str) -> dict[str, Any]:
    """Return what ``--report`` writes."""
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    families = {family: vars(result) for family, result in results.items()}
    return versions | {"level": level, "tests": tests, "families": families}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tests", type=Path, help="checkout of transformers; default: git's")
    parser.add_argument("--families", default=",".join(FAMILIES), help="by comma; default: all")
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
            options = {"limit": chosen.limit, "outcomes": outcomes, "level": chosen.level}
            runs.append(run(tree, family, patched=name == "patched", **options))
        results[family] = compare(*runs)
        for test, reason in results[family].new.items():
            print(f"NEW {test}\n    {reason}", flush=True)
        print(f"{family}: {results[family]}", flush=True)
        if chosen.report:
            found = report(results, tree.name, chosen.level)
            chosen.report.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(result.new for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
