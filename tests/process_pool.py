"""Names of ``run_ranks`` for tests that import them from here."""

from run_ranks import CONTEXT, World, on_fresh_ranks, start_process

__all__ = ["CONTEXT", "World", "on_fresh_ranks", "start_process"]
