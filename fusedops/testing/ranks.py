"""What went wrong on ranks, whether they are threads or processes."""

from __future__ import annotations

from collections.abc import Mapping


class RankError(RuntimeError):
    """A rank raised, died, or never ended.

    Attributes:
        why: what happened to the run as a whole.
        tracebacks: by rank.
        errors: by rank, what was raised.
    """

    def __init__(
        self,
        why: str,
        tracebacks: Mapping[int, str],
        errors: Mapping[int, BaseException] | None = None,
    ) -> None:
        lines = [why, *(f"rank {rank}:\n{text}" for rank, text in sorted(tracebacks.items()))]
        super().__init__("\n".join(line for line in lines if line))
        self.why, self.tracebacks, self.errors = why, dict(tracebacks), dict(errors or {})
