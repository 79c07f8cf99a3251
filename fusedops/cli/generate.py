"""``fusedops generate``: text that continues a prompt, by a trained model.

The work is ``fusedops.generation``; here are the command line, the terminal and the exit codes: 0
when the text is there, 1 when no checkpoint is good, 2 for what the user can put right.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fusedops.cli.errors import print_message, report_errors_once, start_processes
from fusedops.terminal import files
from fusedops.terminal.progress import activity

if TYPE_CHECKING:
    from fusedops.generation import Options
    from fusedops.generation.load import Loaded
    from fusedops.launch.processes import Ranks

_DTYPES = ("float32", "bfloat16", "float16")
_WEIGHTS = ("int8", "int4", "nf4")
_DEVICES = ("auto", "cpu", "cuda")


def generate(
    checkpoint: Annotated[str, Argument(help="Folder of a run, or of a Hugging Face model.")],
    prompt: Annotated[list[str] | None, Option(help="Text to continue; repeatable.")] = None,
    tokens: Annotated[int | None, Option(help="Most new tokens; default: 100.")] = None,
    temperature: Annotated[float, Option(help="0: always the most probable token.")] = 0.0,
    top_k: Annotated[int, Option(help="Sample from this many tokens; 0: all.")] = 0,
    top_p: Annotated[float, Option(help="Sample from the least set this probable.")] = 1.0,
    repetition_penalty: Annotated[float, Option(help="Above 1: fewer repetitions.")] = 1.0,
    seed: Annotated[int, Option(help="Seed of the sampling.")] = 0,
    samples: Annotated[int, Option(help="Number of texts per prompt.")] = 1,
    beams: Annotated[int, Option(help="Beam search with this many beams.")] = 1,
    length_penalty: Annotated[float, Option(help="Above 0: longer beams score more.")] = 1.0,
    stop: Annotated[list[str] | None, Option(help="Text that ends generation; repeatable.")] = None,
    tokenizer: Annotated[str | None, Option(help="bytes, or a tokenizer.json.")] = None,
    step: Annotated[int | None, Option(help="Step of a run; default: the last.")] = None,
    dtype: Annotated[str | None, Option(help=f"{', '.join(_DTYPES)}; default: as saved.")] = None,
    weights: Annotated[
        str | None, Option(help=f"Quantise to {', '.join(_WEIGHTS)}; default: not.")
    ] = None,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    processes: Annotated[int, Option(min=1, help="Processes on this machine.")] = 1,
    overrides: Annotated[
        list[str] | None, Option("--set", help="Layout: parallel.tp=2; default: all in tp.")
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
        words = (
            ("--dtype", dtype or _DTYPES[0], _DTYPES),
            ("--weights", weights or _WEIGHTS[0], _WEIGHTS),
            ("--device", device, _DEVICES),
        )
        for option, word, known in words:
            if word not in known:
                raise files.UserError(f"{option} must be one of {', '.join(known)}, got {word}")
        if beams > 1 and stops:
            raise files.UserError(
                "--stop does not work with --beams, which only tokens end: leave one of them out"
            )
        if processes > 1:
            start_processes(processes)
        from fusedops.generation import Options
        from fusedops.generation.load import load
        from fusedops.launch.processes import initialize_distributed

        with files.user_errors(ValueError, TypeError):
            options = Options(
                tokens=100 if tokens is None else tokens,
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
                chosen: dict[str, Any] = {"dtype": dtype, "tokenizer": tokenizer, "step": step}
                loaded = load(checkpoint, ranks, parallel=parallel, weights=weights, **chosen)
            _continue(loaded, ranks, prompts, stops, options, exact=tokens is not None)


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


def _continue(
    loaded: Loaded,
    ranks: Ranks,
    texts: list[str],
    stops: list[str],
    options: Options,
    *,
    exact: bool,
) -> None:
    """Continue prompts and print the texts on the first rank; a single one is written as it comes.

    ``exact`` says that the number of tokens was given; else it is no larger than there is room for.
    """
    from fusedops.generation import generate, stream
    from fusedops.generation.sequences import check
    from fusedops.generation.text import TextStream

    config = loaded.engine.model.config
    prompts = [loaded.text.encode(text) for text in texts]
    for text, tokens in zip(texts, prompts, strict=True):
        if not tokens:
            raise files.UserError(f"the prompt {text!r} has no token: give one letter at least")
    ends = tuple(token for token in loaded.text.stop if token < config.vocab_size)
    options = replace(options, stop=ends)
    if not exact and config.position_tables:
        room = config.seq_len - max(map(len, prompts))
        options = replace(options, tokens=max(1, min(options.tokens, room)))
    with files.user_errors(ValueError, TypeError):
        check(loaded.engine, prompts, options)
    samples = options.samples
    count = len(prompts) * samples
    streams = [TextStream(loaded.text, stops, prompts[n // samples]) for n in range(count)]
    first, alone = ranks.rank == 0, count == 1 and options.beams == 1
    if first:
        print_message(f"{loaded.description}, {ranks.description}")
        if loaded.quantization is not None:
            print_message(str(loaded.quantization))

    def write(text: str) -> None:
        if first and text:
            sys.stdout.write(text)
            sys.stdout.flush()

    written, made, begin = [""] * count, 0, time.perf_counter()
    if alone:
        write(texts[0])
    try:
        with activity(f"generating {count} texts", visible=first and not alone):
            if options.beams > 1:
                results = generate(loaded.engine, prompts, options)
                for words, result in zip(streams, results, strict=True):
                    made += len(result.tokens)
                    for token in result.tokens[: -1 if result.reason == "stop" else None]:
                        words.feed(token)
            else:
                until = replace(options, until=lambda n, tokens: streams[n].feed(tokens[-1]))
                for number, _, _ in stream(loaded.engine, prompts, until):
                    made += 1
                    written[number] += (fresh := streams[number].take())
                    write(fresh if alone else "")
            seconds = time.perf_counter() - begin
            for number, words in enumerate(streams):
                words.feed(None)
                written[number] += (fresh := words.take())
                write(fresh if alone else "")
    finally:
        if alone:  # also behind a text that an error ends
            write("\n")
    for number, text in enumerate([] if alone else written):
        prompt, sample = divmod(number, samples)
        name = f"{prompt + 1}.{sample + 1}" if samples > 1 else f"{prompt + 1}"
        head = f"[{name}] " if count > 1 else ""
        write(f"{head}{texts[prompt]}{text}\n")
    if first:
        print_message(f"{made} tokens, {made / seconds:,.0f} tokens/s")
