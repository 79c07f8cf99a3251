"""What each rank of a running job does with its time, and what makes the job slow.

``StepRecorder`` times the sections of every step, ``ModuleTimer`` those of any module's training;
``Detector`` looks at the rows of all ranks, and ``RunWatch`` keeps both in a folder;
``read_timings`` reads what a run has recorded. docs/observe.md leads from a slow job to its cause.
"""

from fusedops.profiler.detection import Detector, Finding
from fusedops.profiler.module_timer import ModuleTimer
from fusedops.profiler.recorder import StepRecorder
from fusedops.profiler.timings import RunShape, Timings, TimingsWriter, read_timings
from fusedops.profiler.watch import RunWatch

__all__ = [
    "Detector",
    "Finding",
    "ModuleTimer",
    "RunShape",
    "RunWatch",
    "StepRecorder",
    "Timings",
    "TimingsWriter",
    "read_timings",
]
