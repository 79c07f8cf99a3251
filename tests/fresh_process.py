"""Runs code in a process that has imported torch, but nothing of fusedops.

Such a process is forked from a server that has imported torch once: it starts in milliseconds,
where a new Python would import torch for seconds. The import of fusedops in it reads the variables
of the environment that a test gives. Another server imports more than torch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path
from typing import Any, NoReturn

SECONDS = 300  # until a process counts as hanging


def run(
    code: str,
    *,
    folder: Path | None = None,
    check: bool = False,
    imported: str = "torch",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own and return its exit code and what it wrote.

    Args:
        code: a program, which may be indented.
        folder: the working directory.
        check: whether another exit code than 0 fails the test.
        imported: modules that the server has imported, with commas.
        **environment: added to the variables of this process. ``PYTHONPATH`` precedes the server's.
    """
    request: dict[str, Any] = {
        "code": textwrap.dedent(code),
        "folder": str(folder or Path.cwd()),
        "environment": os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    }
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs, name) for name in ("stdout", "stderr")]
        server = _server(imported)
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request | {"outputs": list(map(str, files))}) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        done = subprocess.CompletedProcess([code], status, *(file.read_text() for file in files))
    assert not check or status == 0, done.stderr
    return done


@functools.cache
def _server(imported: str) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__, imported],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    for name in sys.argv[1].split(","):
        with contextlib.suppress(ImportError):  # tests that need it are skipped
            importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(code: str, folder: str, environment: dict[str, str], outputs: list[str]) -> NoReturn:
    signal.alarm(SECONDS)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = ""  # as of python -c: not the folder of this file
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    for descriptor, name in enumerate([os.devnull, *outputs]):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
    status = 0
    try:
        exec(compile(code, "<code of the test>", "exec"), {"__name__": "__main__"})
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
