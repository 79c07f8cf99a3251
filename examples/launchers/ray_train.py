"""Trains a configuration of ``fusedops train`` under Ray Train, with one worker for each GPU.

    python examples/launchers/ray_train.py train.toml --workers 8

``train.toml`` and the run's folder must be on a file system that all nodes see. Ray Train starts
the workers, connects them, and starts all of them again when one is lost; they then resume from
the last checkpoint of the run's folder, with the same bits. docs/launching.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer

from fusedops.train import InputError, load_config, train


def train_on_worker(given: dict[str, Any]) -> None:
    """Train on this worker; Ray Train has set the process group up."""
    result = train(given["config"], given["overrides"])
    report({"step": result.step, "loss": result.loss, "finished": result.finished})


def main() -> None:
    """Start the workers, wait for them, and print the run's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cpus-per-worker", type=int, default=1)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--failures", type=int, default=3, help="most restarts after a loss")
    parser.add_argument("--cpu", action="store_true", help="train without GPUs")
    options = parser.parse_args()
    config = options.config.resolve()
    try:
        out = load_config(config, options.overrides).out  # before a worker starts
    except InputError as error:
        parser.exit(2, f"fusedops: error: {error}\n")
    ray.init()
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"config": str(config), "overrides": options.overrides},
        torch_config=TorchConfig(backend="gloo" if options.cpu else "cpu:gloo,cuda:nccl"),
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=not options.cpu,
            resources_per_worker={"CPU": options.cpus_per_worker},
        ),
        # Ray's own files; checkpoints are in the run's folder.
        run_config=RunConfig(
            name=config.stem,
            storage_path=str(config.parent / "ray"),
            failure_config=FailureConfig(max_failures=options.failures),
        ),
    )
    trainer.fit()
    print(f"done: {out}")


if __name__ == "__main__":
    main()
