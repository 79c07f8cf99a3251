"""``fusedops generate``: text that continues a prompt, by a trained model.

The work is ``fusedops.generation``; here are the command line, the terminal and the exit codes: 0
when the text is there, 1 when no checkpoint is good, 2 for what the user can put right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fusedops._core import env
from fusedops.cli.errors import print_message, report_errors_once
from fusedops.terminal import files
from fusedops.terminal.progress import activity

if TYPE_CHECKING:
    from fusedops.generation import Options
    from fusedops.generation.load import Loaded
    from fusedops.generation.text import TextStream

_TOKENS = 100
_DTYPES = ("float32", "bfloat16", "float16")
_DEVICES = ("auto", "cpu", "cuda")


def generate(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder of a run of fusedops train, or of a Hugging Face model.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be given several times.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Most new tokens; default: 100, or as many as the positions allow."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the smallest set with this probability.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: earlier tokens become less probable.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    samples: Annotated[int, typer.Option(help="Number of texts per prompt.")] = 1,
    beams: Annotated[int, typer.Option(help="Beam search with this many beams.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Above 0: longer beams score more.")] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends generation; may be given several times."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, or a tokenizer.json; default: the checkpoint's.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Checkpoint of a run by its step; default: the last.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(_DTYPES)}; default: the saved dtype.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    processes: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Layout, such as parallel.tp=2; default: all in tp."),
    ] = None,
) -> None:
    """Continue a prompt with a trained model; text is printed while it is generated.

    A checkpoint of any number of processes is loaded by any other: docs/generation.md.
    """
    prompts, stops = prompt or [], stop or []
    with report_errors_once():
        files.check_environment()
        parallel = _parallel_table(overrides or [])
        if not prompts:
            raise files.UserError("--prompt is missing: give the text to continue, --prompt TEXT")
        _check_texts("--prompt", prompts)
        _check_texts("--stop", stops)
        _check_texts("--tokenizer", [] if tokenizer is None else [tokenizer])
        _check_texts("CHECKPOINT", [checkpoint])
        _check_word("--dtype", dtype or _DTYPES[0], _DTYPES)
        _check_word("--device", device, _DEVICES)
        if beams > 1 and stops:
            raise files.UserError(
                "--stop does not work with --beams, which only tokens end: leave one of them out"
            )
        if processes > 1:
            _launch(processes)
        from fusedops.generation import Options
        from fusedops.generation.load import load
        from fusedops.launch.processes import initialize_distributed

        with files.user_errors(ValueError, TypeError):
            options = Options(
                tokens=_TOKENS if tokens is None else tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                repetition_penalty=repetition_penalty,
                seed=seed,
                samples=samples,
                beams=beams,
                length_penalty=length_penalty,
            )
        with initialize_distributed(device) as ranks:
            with activity(f"loading {checkpoint}", visible=ranks.rank == 0):
                loaded = load(
                    checkpoint,
                    ranks,
                    parallel=parallel,
                    dtype=dtype,
                    tokenizer=tokenizer,
                    step=step,
                )
            run = _Run(loaded, prompts, stops, options, first=ranks.rank == 0)
            with files.user_errors(ValueError, TypeError):
                run.fit(exact=tokens is not None)
            run.log(f"{loaded.description}, {ranks.description}")
            run.show(run.generate())


def _launch(processes: int) -> None:
    """Start the processes and leave with their exit code, unless a launcher has started them."""
    from fusedops.launch.job import join_job
    from fusedops.train import launch

    join_job()
    if env.launched() is None:
        raise SystemExit(launch(processes, sys.argv[1:]))


def _parallel_table(overrides: list[str]) -> dict[str, Any] | None:
    """Return the table ``[parallel]`` that ``--set`` gives, if it gives one."""
    from fusedops.launch import config_table

    given = config_table.override({}, overrides)
    if given.keys() - {"parallel"} or not isinstance(given.get("parallel", {}), dict):
        raise files.UserError("--set must be of [parallel], such as parallel.tp=2")
    return given.get("parallel")


def _check_texts(option: str, texts: list[str]) -> None:
    """Raise unless each is a text: bytes of a shell that are no UTF-8 arrive as surrogates."""
    for text in texts:
        expected = f"{option} must be a text of one letter at least"
        if not text:
            raise files.UserError(f"{expected}, got an empty one")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise files.UserError(f"{expected} in UTF-8, got {ascii(text)}") from None


def _check_word(option: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise files.UserError(f"{option} must be one of {', '.join(known)}, got {word}")


class _Run:
    """Prompts that are gone on from, on this process."""

    def __init__(
        self, loaded: Loaded, texts: list[str], stops: list[str], options: Options, *, first: bool
    ) -> None:
        self._engine, self._text = loaded.engine, loaded.text
        self._texts, self._stops, self._first = texts, stops, first
        self._prompts = [loaded.text.encode(text) for text in texts]
        for text, tokens in zip(texts, self._prompts, strict=True):
            if not tokens:
                raise files.UserError(
                    f"the prompt {text!r} has no token: give a text of one letter at least"
                )
        self._config = loaded.engine.model.config
        words = self._config.vocab_size
        ends = tuple(token for token in loaded.text.stop if token < words)
        self._options = replace(options, stop=ends)
        self._seconds = 0.0
        self._tokens: list[list[int]] = []
        self._words: list[TextStream] = []

    def fit(self, *, exact: bool) -> None:
        """Ask for no more tokens than there is room for, where no number was given.

        Raises:
            ValueError: a prompt or an option does not fit the model.
        """
        from fusedops.generation.sequences import check

        rooms = [_TOKENS]
        longest, config = max(len(tokens) for tokens in self._prompts), self._config
        if config.position_tables:
            rooms.append(config.seq_len - longest)
        if not exact:
            self._options = replace(self._options, tokens=max(1, min(rooms)))
        check(self._engine, self._prompts, self._options)

    def log(self, text: str) -> None:
        """Print a line to stderr on the first rank."""
        if self._first:
            print_message(text)

    def generate(self) -> list[str]:
        """Return the texts; a single one is written as it comes."""
        from fusedops.generation.text import TextStream

        samples = self._options.samples
        count = len(self._prompts) * samples
        self._words = [
            TextStream(self._text, self._stops, self._prompts[number // samples])
            for number in range(count)
        ]
        texts = [""] * count
        alone = count == 1 and self._options.beams == 1
        if alone:
            self._write(self._texts[0])
        try:
            with activity(f"generating {count} texts", visible=self._first and not alone):
                return self._generate(texts, alone)
        finally:
            if alone:  # also behind a text that an error ends
                self._write("\n")

    def _generate(self, texts: list[str], alone: bool) -> list[str]:
        """Return the texts, ``texts`` so far; a single one is written as it comes."""
        from fusedops.generation import generate, stream

        begin = time.perf_counter()
        if self._options.beams > 1:
            results = generate(self._engine, self._prompts, self._options)
            self._tokens = [result.tokens for result in results]
            for words, result in zip(self._words, results, strict=True):
                for token in result.tokens[: -1 if result.reason == "stop" else None]:
                    words.feed(token)
        else:
            until = replace(self._options, until=lambda n, made: self._words[n].feed(made[-1]))
            self._tokens = [[] for _ in texts]
            for number, token, _ in stream(self._engine, self._prompts, until):
                self._tokens[number].append(token)
                texts[number] += self._new_text(number, alone)
        self._seconds = time.perf_counter() - begin
        for number, words in enumerate(self._words):
            words.feed(None)
            texts[number] += self._new_text(number, alone)
        return [] if alone else texts

    def _new_text(self, number: int, alone: bool) -> str:
        fresh = self._words[number].take()
        if alone:
            self._write(fresh)
        return fresh

    def show(self, texts: list[str]) -> None:
        """Print texts that were not written as they came, and how long it took."""
        samples = self._options.samples
        for number, text in enumerate(texts):
            prompt, sample = divmod(number, samples)
            name = f"{prompt + 1}.{sample + 1}" if samples > 1 else f"{prompt + 1}"
            head = f"[{name}] " if len(texts) > 1 else ""
            self._write(f"{head}{self._texts[prompt]}{text}\n")
        count = sum(map(len, self._tokens))
        self.log(f"{count} tokens, {count / self._seconds:,.0f} tokens/s")

    def _write(self, text: str) -> None:
        if self._first and text:
            sys.stdout.write(text)
            sys.stdout.flush()
