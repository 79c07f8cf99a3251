"""What each rank of a running job does with its time, and what makes the job slow.

``StepRecorder`` times the sections of every step; ``Detector`` looks at the rows of all ranks;
``read_timings`` reads what a run has recorded. docs/observe.md leads from a slow job to its cause.
"""

from fusedops.profiler.detection import Detector, Finding, Thresholds
from fusedops.profiler.recorder import StepRecorder
from fusedops.profiler.timings import RunShape, Timings, TimingsWriter, read_timings

__all__ = [
    "Detector",
    "Finding",
    "RunShape",
    "StepRecorder",
    "Thresholds",
    "Timings",
    "TimingsWriter",
    "read_timings",
]
