"""``fusedops generate`` from the command line: text on stdout, mistakes on stderr, exit code 2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fusedops
from fusedops.cli.main import app
from fusedops.generation.text import Text, TextStream
from fusedops.models import TINY, Transformer, load_huggingface, save_huggingface
from fusedops.train import train

PROMPT = "the quick"


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["generate", *args])


def run_and_export(
    folder: Path,
    preset: str,
    seq_len: int,
    steps: int,
    data: dict[str, Any],
    lr: float = 1e-3,
    parallel: dict[str, Any] | None = None,
) -> tuple[str, str]:
    """Train; return the run, and its weights as those of Hugging Face."""
    train(
        {
            "out": str(folder / "run"),
            "export": str(folder / "export"),
            "steps": steps,
            "batch": 8,
            "device": "cpu",
            "tune_host": False,
            "model": {"preset": preset, "seq_len": seq_len},
            "data": {"seq_len": seq_len // 2, **data},
            "optimizer": {"lr": lr},
            "parallel": parallel or {},
            "log": {"peak_tflops": 1.0},
        }
    )
    return str(folder / "run"), str(folder / "export")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return run_and_export(folder, "tiny-gpt2", 64, 30, {"train": [f"{folder}/text.txt"]}, 5e-3)


@pytest.mark.ci
def test_text_goes_on_from_what_was_trained(folders: tuple[str, str]) -> None:
    run, export = folders
    done = invoke(run, "--prompt", PROMPT)
    assert done.exit_code == 0, done.output
    # As many tokens as there are positions for.
    count = 64 - len(PROMPT)
    model = load_huggingface(export)
    tokens = fusedops.generate(model, list(PROMPT.encode()), tokens=count)[0].tokens
    assert done.stdout == f"{PROMPT}{bytes(tokens).decode(errors='replace')}\n"
    assert f"{run}, step 30, 1 process on cpu" in done.stderr
    assert f"{count} tokens, " in done.stderr
    for more in ([], ["--tokenizer", "bytes"]):
        assert invoke(export, "--prompt", PROMPT, *more).stdout == done.stdout


def test_quantised_weights_are_reported(folders: tuple[str, str]) -> None:
    run, export = folders
    done = invoke(run, "--prompt", PROMPT, "--weights", "int8", "--tokens", "12")
    assert done.exit_code == 0, done.output
    assert "MiB before" in done.stderr and "largest relative error" in done.stderr
    model = load_huggingface(export)
    model.join_projections()
    fusedops.quantize(model, "int8", head="int8")
    tokens = fusedops.generate(model, list(PROMPT.encode()), tokens=12)[0].tokens
    assert done.stdout == f"{PROMPT}{bytes(tokens).decode(errors='replace')}\n"
    refused = invoke(run, "--prompt", PROMPT, "--weights", "int3")
    assert refused.exit_code == 2 and "--weights must be one of" in refused.stderr


def test_strings_end_texts_and_samples_are_numbered(folders: tuple[str, str]) -> None:
    run, _ = folders
    text = invoke(run, "--prompt", PROMPT).stdout.removeprefix(PROMPT)
    stop = text[10:14]
    stopped = invoke(run, "--prompt", PROMPT, "--stop", stop, "--stop", "@never@")
    assert stopped.stdout == f"{PROMPT}{text.partition(stop)[0]}\n"
    several = ["--prompt", PROMPT, "--prompt", "the lazy", "--samples", "2", "--tokens", "3"]
    drawn = invoke(run, *several, "--temperature", "0.3")
    heads = [f"[{prompt}.{sample}] " for prompt in (1, 2) for sample in (1, 2)]
    lines = drawn.stdout.splitlines()
    assert [line[:6] for line in lines] == heads
    assert lines[0][6:].startswith(PROMPT) and lines[2][6:].startswith("the lazy")
    beams = invoke(run, "--prompt", PROMPT, "--beams", "3", "--tokens", "6")
    assert beams.stdout.startswith(PROMPT) and len(beams.stdout) == len(PROMPT) + 6 + 1


MANY = ["--samples", str(2**40)]
BAD = {
    "a folder that is no checkpoint": (["{folder}"], "is no checkpoint: neither a run"),
    "a folder that is not there": (["{folder}/nowhere"], "is no checkpoint"),
    "an empty prompt": (["{run}", "--prompt", ""], "got an empty one"),
    "a prompt past the positions": (["{run}", "--prompt", "a" * 64], "prompt alone is too long"),
    "too many tokens": (["{run}", "--prompt", "abcd", "--tokens", "61"], "at most 60 tokens more"),
    "no tokens": (["{run}", "--tokens", "0"], "tokens must be"),
    "a step that was not kept": (["{run}", "--step", "7"], "no whole checkpoint of step 7"),
    "too many processes": (["{run}", "--set", "parallel.tp=2"], "tp"),
    "another table": (["{run}", "--set", "model.seq_len=2"], "--set must be of [parallel]"),
    "a key that is none": (["{run}", "--set", "parallel.pt=2"], "did you mean 'tp'"),
    "a tokenizer that is none": (["{run}", "--tokenizer", ""], "--tokenizer must be a text of one"),
    "a tokenizer that is not there": (["{run}", "--tokenizer", "{folder}/a"], "cannot be read: No"),
    "a damaged tokenizer": (["{run}", "--tokenizer", "{export}/config.json"], "cannot be read: "),
    "an empty folder name": ([""], "CHECKPOINT must be a text of one letter at least"),
    "bytes that are no text": (["{run}", "--prompt", "a\udcff"], "in UTF-8, got 'a\\udcff'"),
    "an empty stop": (["{run}", "--stop", ""], "--stop must be a text of one letter at least, got"),
    "a stop of beams": (["{run}", "--beams", "2", "--stop", "a"], "--stop does not work with --b"),
    "more tokens than an int": (["{run}", "--tokens", str(2**70)], "tokens must be an int of 64 b"),
    "samples without end": (["{run}", *MANY, "--temperature", "1"], "samples must be at most 655"),
    "samples that are equal": (["{run}", "--samples", "2"], "samples must be 1 unless temperature"),
    "too many beams": (["{run}", "--beams", "400"], "beams must be at most the 320 words, got 400"),
    "no beams": (["{run}", "--beams", "0"], "beams must be at least 1"),
    "a step below 0": (["{run}", "--step", "-1"], "no whole checkpoint of step -1"),
    "a seed below 0": (["{run}", "--seed", "-1"], "seed must be at least 0"),
    "no number": (["{run}", "--set", "parallel.tp=x"], "parallel.tp must be an integer, got 'x'"),
    "a dtype that is none": (["{run}", "--dtype", "int8"], "--dtype must be one of"),
    "a device that is none": (["{run}", "--device", "tpu"], "--device must be one of auto, cpu"),
    "draws of beams": (["{run}", "--beams", "2", "--temperature", "1"], "with beams"),
    "no prompt": (["{run}", "--no-prompt"], "--prompt TEXT"),
}
for option, values, words in (
    ("--temperature", ("-1", "nan", "inf"), "temperature must be "),
    ("--top-k", ("-1", "5"), "top_k must be "),
    ("--top-p", ("0", "2", "nan", "0.5"), "top_p must be "),
    ("--repetition-penalty", ("0", "nan", "1e-300"), "repetition_penalty must be "),
    ("--length-penalty", ("nan", "1e9", "-1e6"), "length_penalty must be "),
):
    BAD |= {f"{option} {value}": (["{run}", option, value], words) for value in values}


def broken(folder: Path, source: str, damage: str) -> str:
    """Return a copy of an export in which one file is damaged."""
    shutil.copytree(source, folder / "broken")
    path = folder / "broken" / damage
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return str(folder / "broken")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("model.safetensors", "is no safetensors file"),
        ("config.json", "config.json is not valid JSON"),
        ("tokenizer.json", "tokenizer.json cannot be read"),
    ],
)
def test_a_damaged_folder_is_a_line_and_exit_code_2(
    damage: str, words: str, folders: tuple[str, str], tmp_path: Path
) -> None:
    done = invoke(broken(tmp_path, folders[1], damage), "--prompt", PROMPT)
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "") and words in line


@pytest.mark.parametrize("what", BAD)
def test_mistakes_are_a_line_and_exit_code_2(
    what: str, folders: tuple[str, str], tmp_path: Path
) -> None:
    run, export = folders
    args, words = BAD[what]
    args = [arg.format(folder=tmp_path, run=run, export=export) for arg in args]
    if "--no-prompt" in args:
        args.remove("--no-prompt")
    elif "--prompt" not in args:
        args += ["--prompt", PROMPT]
    done = invoke(*args)
    assert done.exit_code == 2, done.output
    *_, last = done.stderr.splitlines()
    assert last.startswith("fusedops: error: ") and words in last
    assert len(done.stderr.splitlines()) <= 2 and not done.stdout


def of_pieces(
    path: Path, pieces: list[str], unknown: str, splits: tuple[str, ...], joins: str | None = None
) -> Path:
    """Write a tokenizer of whole pieces; ``splits`` and ``joins`` name classes of tokenizers."""
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unknown))
    kind, *options = splits
    made.pre_tokenizer = getattr(tokenizers.pre_tokenizers, kind)(*options)
    if joins is not None:
        made.decoder = getattr(tokenizers.decoders, joins)()
    made.save(str(path))
    return path


def test_a_vocabulary_of_pieces_is_read_with_the_checkpoint(tmp_path: Path) -> None:
    pieces = ["<|endoftext|>", "hello", " world", "\u0120", "a"]
    of_pieces(tmp_path / "tokenizer.json", pieces, "a", ("Split", " world", "isolated"), "Fuse")
    save_huggingface(Transformer(TINY["tiny-llama"]), tmp_path)
    done = invoke(str(tmp_path), "--prompt", "hello world", "--tokens", "4")
    assert done.exit_code == 0 and done.stdout.startswith("hello world"), done.output


def test_a_space_between_prompt_and_text_stays(tmp_path: Path) -> None:
    pieces = ["<unk>", *(f"\u2581{each}" for each in ("once", "upon", "a", "time"))]
    # As Llama's: a space is part of the piece after it, and a text's first one is dropped.
    path = of_pieces(tmp_path / "pieces.json", pieces, "<unk>", ("Metaspace",), "Metaspace")
    text = Text.of(str(path))
    tokens = text.encode("once upon a time")
    words = TextStream(text, [" ti"], tokens[:2])
    assert [words.feed(token) for token in tokens[2:]] == [False, True]
    assert words.take() == " a"


def test_configurations_that_name_no_tokens_are_refused(tmp_path: Path) -> None:
    save_huggingface(Transformer(TINY["tiny-gpt2"]), tmp_path)
    for text, words in (("{", "is not valid JSON"), ('{"eos_token_id": "a"}', "got 'a'")):
        (tmp_path / "generation_config.json").write_text(text)
        done = invoke(str(tmp_path), "--tokenizer", "bytes", "--prompt", PROMPT)
        assert done.exit_code == 2 and "generation_config.json" in done.stderr
        assert words in done.stderr, done.output


def test_letters_come_whole_and_what_may_end_a_text_is_held_back() -> None:
    words = TextStream(Text.of("bytes"), ["END", "\u00e9\u00e9"])
    told = []
    for byte in "a\u00e9E\u20acENx\u00e9!".encode():
        assert not words.feed(byte)
        told.append(words.take())
    assert told == ["a", "", "", "\u00e9", "", "", "E\u20ac", "", "", "ENx", "", "", "\u00e9!"]
    for byte in b"zEN":
        words.feed(byte)
    assert words.take() == "z" and words.feed(ord("D")) and words.take() == ""


def test_an_export_is_loaded_by_transformers_and_has_its_tokenizer(
    folders: tuple[str, str],
) -> None:
    transformers = pytest.importorskip("transformers")
    run, export = folders
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert tokenizer.eos_token_id == theirs.generation_config.eos_token_id == 256
    assert theirs.config.eos_token_id == 256 and theirs.config.bos_token_id is None
    every = "".join(map(chr, range(256))) + "  \u20ac\r\n\t a"
    assert tokenizer(every).input_ids == list(every.encode())
    assert tokenizer.decode(tokenizer(every).input_ids) == every
    ids = tokenizer(PROMPT, return_tensors="pt")
    made = theirs.generate(**ids, max_new_tokens=9, do_sample=False, pad_token_id=256)
    assert invoke(run, "--prompt", PROMPT, "--tokens", "9").stdout.startswith(
        tokenizer.decode(made[0], skip_special_tokens=True)
    )


@pytest.mark.parametrize("settings", [False, True])
def test_the_tokenizer_of_a_run_is_copied_to_its_export(settings: bool, tmp_path: Path) -> None:
    words = ["<end>", "one", "two", "?"]
    pieces = of_pieces(tmp_path / "tokenizer.json", words, "?", ("Whitespace",))
    if settings:
        given = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "two"}'
        (tmp_path / "tokenizer_config.json").write_text(given)
    (tmp_path / "text.txt").write_text("one two two " * 40)
    data = {"train": [f"{tmp_path}/text.txt"], "tokenizer": str(pieces), "end_of_text": "<end>"}
    run, export = run_and_export(tmp_path, "tiny-llama", 32, 1, data)
    assert (Path(export) / "tokenizer.json").read_bytes() == pieces.read_bytes()
    asked = ["--prompt", "one two", "--tokens", "4"]
    done = invoke(export, *asked)
    assert done.exit_code == 0, done.output
    assert done.stdout == invoke(run, *asked).stdout
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    assert tokenizer("one two").input_ids == [1, 2]
    assert tokenizer.eos_token == ("two" if settings else "<end>")


def test_of_a_corpus_of_tokens_alone_a_tokenizer_must_be_given(tmp_path: Path) -> None:
    tokens = torch.randint(0, 200, (400,), dtype=torch.int32)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "tokens.bin").write_bytes(tokens.numpy().tobytes())
    data = {"train": [str(folder)], "token_dtype": "int32"}
    run, export = run_and_export(tmp_path, "tiny-llama", 32, 1, data)
    shutil.rmtree(folder)  # a model is used where its corpus is not
    for checkpoint, words in (
        (run, "was trained on a file of tokens, which does not say what they mean"),
        (export, "has no tokenizer.json: give --tokenizer"),
    ):
        done = invoke(checkpoint, "--prompt", PROMPT)
        assert done.exit_code == 2 and words in done.stderr, done.output
        done = invoke(checkpoint, "--prompt", PROMPT, "--tokenizer", "bytes", "--tokens", "2")
        assert done.exit_code == 0, done.output


def test_a_letter_that_is_cut_at_the_end_is_shown(folders: tuple[str, str]) -> None:
    pytest.importorskip("tokenizers")
    for tokenizer in ("bytes", f"{folders[1]}/tokenizer.json"):
        words = TextStream(Text.of(tokenizer), ["\u20acx"])
        for token in (*"a\u20acb".encode(), *"\u20ac".encode()[:2], 256):
            words.feed(token)
        words.feed(None)
        assert words.take() == "a\u20acb\ufffd"
