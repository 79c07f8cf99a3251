"""Training a transformer from a configuration file (``training.md``)."""

from fusedops.launch.config_table import InputError
from fusedops.launch.processes import launch
from fusedops.train.config import Config, load_config
from fusedops.train.loop import train
from fusedops.train.progress import ProgressCallback, ProgressLines, TrainResult

__all__ = [
    "Config",
    "InputError",
    "ProgressCallback",
    "ProgressLines",
    "TrainResult",
    "launch",
    "load_config",
    "train",
]
