"""``examples/launchers/jobset.yaml``: its schema, and its command with the environment of its pods.

No cluster runs here. The JobSet is read by the models that Kubeflow generates from JobSet's OpenAPI
document, and its job template by the strict JSON schema of Kubernetes. ``make test-launchers`` has
both packages.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_runs import (
    assert_same_end,
    ended,
    environment,
    free_port,
    run_uninterrupted,
    wait_for_steps,
    write_config,
)

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "launchers" / "jobset.yaml"
STEPS = 60
RANK_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@pytest.fixture
def jobset() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def container(jobset: dict[str, Any]) -> dict[str, Any]:
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job["template"]["spec"]["containers"][0]


def unknown_keys(given: Any, parsed: Any, path: str = "") -> list[str]:
    """Return the keys of a manifest that a model has dropped."""
    if isinstance(given, dict):
        return [
            key
            for name in given
            for key in (
                unknown_keys(given[name], parsed[name], f"{path}.{name}")
                if name in parsed
                else [f"{path}.{name}"]
            )
        ]
    if isinstance(given, list):
        return [
            key
            for number, item in enumerate(given)
            for key in unknown_keys(item, parsed[number], f"{path}[{number}]")
        ]
    return []


def test_the_jobset_fits_the_published_models(jobset: dict[str, Any]) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api: make test-launchers"
    )
    parsed = models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()
    assert unknown_keys(jobset, parsed) == []


def test_the_job_template_fits_the_strict_schema_of_kubernetes(jobset: dict[str, Any]) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate: make test-launchers"
    )
    (job,) = (entry["template"] for entry in jobset["spec"]["replicatedJobs"])
    job |= {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}}
    for version in ("1.31", "1.37"):
        validator.validate(job, version, strict=True)


def test_the_address_is_the_name_of_the_first_pod(jobset: dict[str, Any]) -> None:
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    (job,) = spec["replicatedJobs"]
    values = {entry["name"]: entry.get("value") for entry in container(jobset)["env"]}
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>
    pod = f"{name}-{job['name']}-0-0.{spec['network']['subdomain']}"
    assert values["PET_MASTER_ADDR"] == pod
    assert int(values["PET_NNODES"]) == job["template"]["spec"]["completions"]


def start_pod(jobset: dict[str, Any], index: int, config: Path, port: int) -> Any:
    """Start the command of a pod, with the address and the paths of this machine."""
    pod = container(jobset)
    variables = environment()
    for entry in pod["env"]:
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        assert field in (None, RANK_FIELD)
        variables[entry["name"]] = str(index) if field else entry["value"]
    variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    program, *words = [*pod["command"], *pod["args"]]
    assert program == "fusedops"
    replaced = {"/config/train.toml": str(config), "8": "1"}
    words = [replaced.get(word, word) for word in words]
    given = [sys.executable, "-m", "fusedops", *words]
    return subprocess.Popen(given, env=variables, stderr=subprocess.PIPE, text=True)


def start_pods(jobset: dict[str, Any], config: Path) -> list[Any]:
    port = free_port()
    return [start_pod(jobset, index, config, port) for index in range(2)]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_pod_that_is_evicted_stops_all_and_the_next_pods_resume(
    jobset: dict[str, Any], tmp_path: Path
) -> None:
    config = write_config(tmp_path, STEPS)
    pods = start_pods(jobset, config)
    wait_for_steps(tmp_path / "run", 15)
    pods[1].send_signal(signal.SIGTERM)
    codes, reports = ended(*pods)
    assert codes == [75, 75] and "stopped at step " in reports[0], reports
    assert not any("Traceback" in report for report in reports), reports
    codes, reports = ended(*start_pods(jobset, config))
    assert codes == [0, 0] and "resumes from step " in reports[0], reports
    assert_same_end(tmp_path / "run", run_uninterrupted(config, "reference"), STEPS)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_mistake_is_the_exit_code_that_the_manifest_does_not_restart(
    jobset: dict[str, Any], tmp_path: Path
) -> None:
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    config = write_config(tmp_path, STEPS)
    config.write_text(config.read_text().replace("steps =", "stepz ="))
    codes, reports = ended(*start_pods(jobset, config))
    assert codes == [2, 2] and rule["onExitCodes"]["values"] == [2]
    assert "did you mean 'steps'?" in "".join(reports)
