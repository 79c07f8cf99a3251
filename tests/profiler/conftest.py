"""The command, as tests of profiles call it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``output_of(*arguments)`` returns what the command writes to stdout, on one line."""

    def run(*arguments: object) -> str:
        from fusedops.cli.main import app

        app([str(argument) for argument in arguments], standalone_mode=False)
        return " ".join(capsys.readouterr().out.split())

    return run


@pytest.fixture
def error_of(
    capsys: pytest.CaptureFixture[str], output_of: Callable[..., str]
) -> Callable[..., str]:
    """``error_of(*arguments)`` returns what a command that fails writes to stderr, on one line."""

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit):
            output_of(*arguments)
        return " ".join(capsys.readouterr().err.split())

    return run
