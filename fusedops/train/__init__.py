"""Training a transformer from a configuration file (``training.md``)."""

from fusedops.train.config import Config, load_config
from fusedops.train.loop import train
from fusedops.train.outcome import Result, Watcher
from fusedops.train.processes import launch
from fusedops.train.table import InputError

__all__ = ["Config", "InputError", "Result", "Watcher", "launch", "load_config", "train"]
