"""How long a CUDA stream waits for a communication, by timing events: the host does not wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StreamWait:
    """What a CUDA stream waited for a communication, while its host went on.

    Attributes:
        stream: that waited.
        begin: timing event that it recorded before it waited.
        end: timing event that it recorded afterwards.
    """

    stream: Any
    begin: Any
    end: Any


def stream_event() -> Any:
    """Return a timing event that the current CUDA stream has recorded.

    It is ``None`` where this process does not use CUDA, and while a CUDA graph is captured.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
