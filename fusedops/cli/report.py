"""``fusedops profile`` and ``fusedops report``: tables of a run's steps, and a page of it."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from typer import Argument, Option

from fusedops.cli import output
from fusedops.terminal import files
from fusedops.terminal.progress import activity

if TYPE_CHECKING:
    import http.server

    from rich.console import Console


def report(
    run: Annotated[str, Argument(help="Folder of a run of fusedops train.")],
    out: Annotated[str, Option(help="File to write; default: report.html in the run.")] = "",
    plan: Annotated[str, Option(help="JSON of fusedops plan time, to compare.")] = "",
    watch: Annotated[bool, Option("--watch", help="Serve the page until Ctrl-C.")] = False,
    host: Annotated[
        str, Option(help="With --watch: address to listen on; others may then read the run.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="With --watch; 0: any free.")] = 8080,
    every: Annotated[int, Option(min=1, help="With --watch: seconds between reloads.")] = 10,
) -> None:
    """Write one HTML file with the curves, ranks, memory, communication and findings of a run.

    docs/observe.md has pictures of it.
    """
    with files.one_line_errors():
        record = _read_plan(Path(plan)) if plan else None
        if not Path(run).is_dir():
            raise files.UserError(f"{run} is no folder of a run: fusedops train writes it at `out`")
        if watch:
            _watch(run, record, host, port, every)
            return
        file = Path(out or Path(run) / "report.html")
        files.check_writable(str(file))
        from fusedops.cli.report_page import page

        with activity(f"reading {run}"):
            text = page(run, record)
        files.write_text(str(file), text)
        print(f"wrote {file} ({len(text) / 1e6:.1f} MB): open it in a browser")


def profile(
    folder: Annotated[str, Argument(help="A run, or a folder of torch.profiler's traces.")],
    compare: Annotated[str, Option(help="Another such folder, to compare with.")] = "",
    worst: Annotated[int, Option(min=1, help="Slowest ranks to show.")] = 5,
    json_file: Annotated[str, Option("--json", help="Write a file; -: print it instead.")] = "",
    trace_file: Annotated[str, Option("--trace", help="Merge traces, for ui.perfetto.dev.")] = "",
) -> None:
    """Print where the steps of each rank spend their time, and what a job could gain.

    docs/observe.md explains the columns.
    """
    with files.one_line_errors():
        output.check_outputs(json_file, trace_file)
        from fusedops.cli import report_page as tables

        profiled = tables.read(folder)
        if trace_file and not profiled.traces:
            raise files.UserError(
                f"--trace merges traces of torch.profiler, and {folder} has the records of a run"
            )

        def show(out: Console) -> None:
            tables.show(profiled, worst, out)
            if compare:
                tables.compare(profiled, tables.read(compare), out)

        trace = output.text_file(trace_file, lambda: tables.trace_text(profiled, worst))
        output.deliver(tables.record(profiled), json_file, show, trace)


def _read_plan(path: Path) -> dict[str, Any]:
    record = files.read_json(path)
    layouts = record.get("layouts") if isinstance(record, dict) else None
    if not isinstance(layouts, list) or not all(isinstance(row, dict) for row in layouts):
        raise files.UserError(f"{path} is no plan: fusedops plan time --device --json writes one")
    return record


def make_server(
    run: str, plan: dict[str, Any] | None, host: str, port: int, every: int
) -> http.server.ThreadingHTTPServer:
    """Return a server of the page of a run, and of nothing else; each request reads the run again.

    A ``port`` of 0 is any that is free. The browser loads the page again ``every`` so many seconds.
    """
    import http.server
    from html import escape

    from fusedops.cli.report_page import page

    names = [host.lower(), "localhost", socket.gethostname().lower(), socket.getfqdn().lower()]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not _is_own_address(self.headers.get("Host", ""), names):
                self.send_error(403, "the run is shown at this machine's name or address only")
                return
            if self.path not in ("/", "/index.html"):
                self.send_error(404, "only the page of the run is served, at /")
                return
            try:
                status, text = 200, page(run, plan)
            except files.UserError as error:
                status, text = 503, f"<!doctype html><title>waiting</title><p>{escape(str(error))}"
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Refresh", str(every))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return http.server.ThreadingHTTPServer((host, port), Handler)


def _is_own_address(header: str, names: list[str]) -> bool:
    """Return whether a request's ``Host`` is an address or one of these names.

    A web page can let its own name stand for 127.0.0.1, and then read what is served there.
    """
    with suppress(ValueError):
        name = urlsplit(f"//{header}").hostname or ""
        if name in names:
            return True
        ipaddress.ip_address(name)
        return True
    return False


def _watch(run: str, plan: dict[str, Any] | None, host: str, port: int, every: int) -> None:
    try:
        server = make_server(run, plan, host, port, every)
    except OSError as error:
        raise files.UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; --port 0 takes any free port"
        ) from None
    with server:
        print(f"http://{host}:{server.server_port}/ shows {run}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", flush=True)
