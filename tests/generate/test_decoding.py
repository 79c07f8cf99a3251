"""Tokens with a cache are those without, each computed once, whatever else is in the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedops
from fusedops import UnsupportedError
from fusedops.generation import Decoder, NonFiniteLogitsError, stream
from fusedops.models import (
    TINY,
    ParallelConfig,
    Transformer,
    TransformerConfig,
    parallelize,
    save_huggingface,
)
from fusedops.testing import threads

PROMPTS = [[5, 17, 3, 99, 250], [7], [200, 1, 1, 30, 8, 8, 121, 64, 2]]
WINDOW = {"tiny-llama-window": replace(TINY["tiny-llama"], sliding_window=6)}
DECODERS = {name: each for name, each in sorted((TINY | WINDOW).items()) if each.causal}


def made(config: TransformerConfig, **more: Any) -> Transformer:
    """Return a model whose tokens vary; large weights keep the best ones apart."""
    return Transformer(replace(config, initializer_range=0.2, **more)).eval()


def recomputed(model: Transformer, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return the likeliest token at each place of the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_those_of_a_recomputation(name: str) -> None:
    # Generating drops no token, whatever the capacity in training.
    limited = made(DECODERS[name])
    model = made(DECODERS[name], capacity_factor=None)
    model.load_state_dict(limited.state_dict())
    found = fusedops.generate(limited, PROMPTS, tokens=24)
    assert len({token for each in found for token in each.tokens}) > 2
    for prompt, each in zip(PROMPTS, found, strict=True):
        assert each.tokens == recomputed(model, prompt, each.tokens)
        assert each.reason == "length"


def _logits(model: Transformer, prompts: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
    """Return the logits after prompts and after each of some tokens, ``[R, 1 + tokens, V]``."""
    decoder = Decoder(model, 64)
    found = [decoder.prefill([torch.tensor(prompt) for prompt in prompts])]
    found += [decoder.step(step) for step in torch.tensor(tokens).unbind(1)]
    return torch.stack(found, 1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in DECODERS), ("tiny-llama-window", torch.bfloat16)],
)
def test_a_prompt_has_the_same_logits_alone_and_in_a_batch(name: str, dtype: torch.dtype) -> None:
    model = made(DECODERS[name]).to(dtype)
    following = [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    together = _logits(model, PROMPTS, following)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, following, strict=True)):
        alone = _logits(model, [prompt], [tokens])[0]
        if model.config.sparse_layers:
            # The router's product is torch's, which promises no bits.
            torch.testing.assert_close(together[row], alone)
        else:
            assert torch.equal(together[row], alone)


def test_each_token_is_computed_once_and_a_cache_grows_by_half_of_what_it_holds() -> None:
    model = made(TINY["tiny-gpt2"], num_layers=1, seq_len=300)
    decoder, computed = Decoder(model, 300), set()
    layer = model.layers["0"]
    layer.register_forward_pre_hook(lambda _, args: computed.add(args[0][..., 0].numel()))
    logits, capacities = decoder.prefill([torch.tensor([1]), torch.tensor([2])]), set()
    for _ in range(299):
        logits = decoder.step(logits.argmax(-1))
        capacities.add(decoder.cache.capacity)
    assert capacities == {64, 128, 256, 300} and computed == {2}


def test_what_ends_a_sequence() -> None:
    model = made(TINY["tiny-llama"])
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2}
    whole = [each.tokens for each in fusedops.generate(model, PROMPTS, tokens=16, **drawn)]
    stop = whole[0][5]
    found = fusedops.generate(model, PROMPTS, tokens=16, stop=[stop], **drawn)
    for tokens, each in zip(whole, found, strict=True):
        until = tokens.index(stop) + 1 if stop in tokens else 16
        assert each.tokens == tokens[:until]
        assert each.reason == ("stop" if stop in tokens else "length")
    assert found[0].reason == "stop"
    lengths = [3, 16, 1]
    ended = fusedops.generate(
        model,
        PROMPTS,
        tokens=20,
        until=lambda number, made: len(made) == lengths[number],
        **drawn,
    )
    assert [each.tokens for each in ended] == [w[:n] for w, n in zip(whole, lengths, strict=True)]
    assert {each.reason for each in ended} == {"until"}


def test_a_stream_gives_rounds_of_tokens_and_leaves_the_model_as_it_was() -> None:
    model = made(TINY["tiny-mixtral"], dropout=0.1, capacity_factor=1.0).train()
    model.layers["0"].eval()
    before = [dict(module.__dict__) for module in model.modules()]
    options = [dict(layer.feed_forward.gate.options) for layer in model.layers.values()]
    told = []
    for token in stream(model, PROMPTS[:2], tokens=3):
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        told.append(token)
    assert [each.sequence for each in told] == [0, 1] * 3
    assert [each.reason for each in told] == [None] * 4 + ["length"] * 2
    expected = fusedops.generate(model, PROMPTS[:2], tokens=3)
    assert [each.tokens for each in expected] == [[t.token for t in told[n::2]] for n in (0, 1)]
    assert before == [each.__dict__ for each in model.modules()]
    assert options == [each.feed_forward.gate.options for each in model.layers.values()]


def test_two_threads_generate_from_one_model() -> None:
    """Both are inside of the model at the same time, in every call of it."""
    model = made(TINY["tiny-mixtral"], dropout=0.1, capacity_factor=1.0).train()
    prompts = [[5, 17, 3, 8], [200, 1]]
    expected = [fusedops.generate(model, [each], tokens=6)[0].tokens for each in prompts]
    meeting = threading.Barrier(2, timeout=60)

    def meet(*_: Any) -> None:
        meeting.wait()

    model.layers["1"].register_forward_pre_hook(meet)

    def generated(prompt: list[int]) -> list[int]:
        return fusedops.generate(model, [prompt], tokens=6)[0].tokens

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(generated, prompts)) == expected
    assert all(module.training for module in model.modules())


def test_the_last_of_several_calls_sets_the_model_back() -> None:
    model = made(TINY["tiny-llama"], dropout=0.1).train()
    first, second = stream(model, [5], tokens=2), stream(model, [7], tokens=4)
    assert next(first).reason is None and next(second).reason is None
    assert [token.reason for token in first] == ["length"]
    assert not any(module.training for module in model.modules())
    assert [token.reason for token in second] == [None, None, "length"]
    assert all(module.training for module in model.modules())


DOMAINS: dict[str, Any] = {
    "router": "hash",
    "balance_loss": 0.0,
    "capacity_factor": None,
    "top_k": 1,
    "domain_experts": (1, 3),
}
Refusal = tuple[Any, dict[str, Any], type[Exception], str]
# Prompts, what else is passed, and the error. Limits of options: test_generate_command.py.
BAD: dict[str, Refusal] = {
    "an empty prompt": ([[1], []], {}, ValueError, "prompt 1 must be at least one token"),
    "no prompt": ([], {}, ValueError, "prompts must be one at least"),
    "a word that is none": ([256], {}, ValueError, "from 0 to 255"),
    "a set": ({1}, {}, TypeError, "prompts must be tokens: .* got set"),
    "a number": (1, {}, TypeError, "prompts must be tokens: .* got int"),
    "a prompt of letters": (["a"], {}, TypeError, "prompt 0 must be"),
    "fractions": (torch.ones(2), {}, TypeError, "prompt 0"),
    "an encoder": ([1], {"model": "tiny-bert"}, ValueError, "model must be a decoder"),
    "domains": ([1], {"model": "domains"}, UnsupportedError, "must have no domain_experts"),
    "another module": ([1], {"model": None}, TypeError, "model must be a fusedops.models.Tr"),
    "an option that is none": ([1], {"token": 2}, TypeError, "token"),
    "too few seeds": ([[1], [2]], {"seed": [1]}, ValueError, "one number, or 2"),
    "a stop that is no word": ([1], {"stop": [256]}, ValueError, "stop must be tokens"),
    "a stop that is no list": ([1], {"stop": 5}, TypeError, "stop must be tokens, such as"),
    "a seed that is none": ([1], {"seed": None}, TypeError, "seed must be an int, or one of"),
    "no function": ([1], {"until": "."}, TypeError, "until must be callable, got str"),
}


def gpt2() -> Transformer:
    return Transformer(TINY["tiny-gpt2"])


def go(prompts: Any, model: str | None = "tiny-gpt2", **more: Any) -> Any:
    config = TINY["tiny-pangu-moe"] if model == "domains" else TINY.get(model or "")
    if config is None:
        return fusedops.generate(torch.nn.Linear(2, 2), prompts)  # type: ignore[arg-type]
    config = replace(config, **DOMAINS) if model == "domains" else config
    return fusedops.generate(Transformer(config), prompts, **{"tokens": 1, **more})


@pytest.mark.parametrize("what", BAD)
def test_wrong_arguments_are_refused(what: str) -> None:
    prompts, more, kind, words = BAD[what]
    with pytest.raises(kind, match=words):
        go(prompts, **more)


def test_beams_have_no_stream() -> None:
    with pytest.raises(ValueError, match="at the end only"):
        stream(gpt2(), [1], beams=2)


def test_stops_that_can_be_gone_through_once_end_every_sequence() -> None:
    model = made(TINY["tiny-llama"])
    first = [each.tokens[0] for each in fusedops.generate(model, PROMPTS, tokens=1)]
    found = fusedops.generate(model, PROMPTS, tokens=4, stop=(each for each in first))
    assert [(each.tokens, each.reason) for each in found] == [([each], "stop") for each in first]


def test_a_decoder_that_is_given_other_prompts_forgets_those_before() -> None:
    model, rows = made(TINY["tiny-llama"]), [torch.tensor(prompt) for prompt in PROMPTS]
    decoder = Decoder(model, 64)
    decoder.prefill(rows[:2])
    for prompts in (rows[2:], rows, rows[:1]):
        fresh, tokens = Decoder(model, 64), torch.arange(len(prompts))
        assert torch.equal(decoder.prefill(prompts), fresh.prefill(prompts))
        assert torch.equal(decoder.step(tokens), fresh.step(tokens))


def new(most: int, name: str = "tiny-gpt2") -> Decoder:
    return Decoder(Transformer(TINY[name]), most)


def filled(most: int) -> Decoder:
    decoder = new(most)
    decoder.prefill([torch.tensor([1, 2]), torch.tensor([3])])
    return decoder


ONE, NONE, THREE = torch.tensor([1]), torch.tensor([]).long(), torch.arange(3)
BAD_CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an empty prompt": (lambda: new(4).prefill([ONE, NONE]), ValueError, "prompt 1 .* got .0."),
    "a list": (lambda: new(4).prefill([[1]]), TypeError, "prompt 0 must be a torch"),  # type: ignore[list-item]
    "a long prompt": (lambda: new(2).prefill([THREE]), ValueError, "at least 3, .* row, got 2"),
    "a step too many": (lambda: filled(2).step(THREE[:2]), ValueError, "max_seq_len must be at l"),
    "a token for no row": (lambda: filled(4).step(THREE), ValueError, "each of 2 rows, got 3"),
    "a step before prompts": (lambda: new(4).step(THREE), ValueError, "of 0"),
    "tokens in a list": (lambda: filled(4).step([1, 2]), TypeError, "tokens must be a torch.Ten"),  # type: ignore[arg-type]
    "a row that is none": (lambda: filled(4).select(THREE[::2]), ValueError, "less than 2, .* 2"),
    "past the table": (lambda: new(65), ValueError, "at most 64, the model's table .* got 65"),
    "no room": (lambda: new(0), ValueError, "max_seq_len must be at least 1"),
    "an encoder": (lambda: new(4, "tiny-bert"), ValueError, "a decoder"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_wrong_calls_of_a_decoder_are_refused(what: str) -> None:
    call, kind, words = BAD_CALLS[what]
    with pytest.raises(kind, match=f"Decoder: .*{words}"):
        call()


def test_room_that_just_suffices_is_enough() -> None:
    assert len(go([1] * 60, tokens=4)[0].tokens) == 4


BROKEN = 123  # the word whose embedding is not finite: what follows it is not
BROKEN_PROMPTS = [[5, 17, 3], [7, 8], [200, BROKEN, 30, 8]]
CALLS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2},
    {"temperature": 0.8, "samples": 2},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 0.8, "top_p": 0.9},
    {"beams": 3},
)


def damage(model: Transformer, value: float) -> Transformer:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "embedding.tokens.weight":
                parameter[BROKEN] = value
    return model


@pytest.fixture
def model() -> Transformer:
    return Transformer(replace(TINY["tiny-llama"], initializer_range=0.1)).eval()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", CALLS, ids=lambda each: "-".join(each) or "greedy")
def test_the_error_names_prompt_and_position(
    options: dict[str, Any], value: float, model: Transformer
) -> None:
    damage(model, value)
    with pytest.raises(NonFiniteLogitsError, match="for prompt 2 at position 4") as caught:
        fusedops.generate(model, BROKEN_PROMPTS, tokens=5, **options)
    assert (caught.value.prompt, caught.value.position) == (2, 4)


def test_tokens_come_until_one_cannot_be_chosen(model: Transformer) -> None:
    expected = fusedops.generate(model, BROKEN_PROMPTS[0], tokens=6)[0].tokens
    # What follows a word that the model writes itself is not finite.
    with torch.no_grad():
        model.embedding.tokens.weight[expected[3]] = float("nan")
    first = expected.index(expected[3])
    tokens = []
    with pytest.raises(NonFiniteLogitsError, match=f"at position {3 + first + 1} "):
        for each in stream(model, BROKEN_PROMPTS[0], tokens=6):
            tokens.append(each.token)
    assert tokens == expected[: first + 1]
    # A sequence that ends with that word goes on with no token.
    found = fusedops.generate(model, [BROKEN_PROMPTS[0], [7]], tokens=6, stop=[expected[3]])
    assert found[0].tokens == expected[: first + 1] and found[0].reason == "stop"
    assert len(found[1].tokens) == 6


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ({"tp": 2}, "prompt 0 at position 3"),
        ({"pp": 2}, "prompt 0 at position 3"),
        ({"dp": 2}, "prompt 2 at position 4"),
        ({"cp": 2}, "prompt 2 at position 4"),
    ],
    ids=["tp", "pp", "dp", "cp"],
)
def test_all_ranks_raise_what_one_of_them_meets(layout: dict[str, int], where: str) -> None:
    def on_rank(rank: int) -> list[str]:
        whole = Transformer(replace(TINY["tiny-llama"], initializer_range=0.1), device="meta")
        engine = parallelize(whole, ParallelConfig(**layout), seed=0)
        if rank == 1:
            parameter: Any = dict(whole.named_parameters())["head.weight"].detach()
            getattr(parameter, "_local_tensor", parameter)[0] = float("nan")
        messages = []
        for options in CALLS:
            with pytest.raises(NonFiniteLogitsError) as caught:
                fusedops.generate(engine, BROKEN_PROMPTS, tokens=3, **options)
            messages.append(str(caught.value))
        return messages

    first, second = threads.run(on_rank, 2)
    assert first == second and all(where in each for each in first), first


def test_the_command_exits_with_1(model: Transformer, tmp_path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from fusedops.cli.main import app

    save_huggingface(damage(model, float("nan")), tmp_path)
    prompts = ["--prompt", "ab", "--prompt", f"a{chr(BROKEN)}c"]
    for more in ([], ["--temperature", "1"], ["--beams", "2"]):
        done = testing.CliRunner().invoke(
            app, ["generate", str(tmp_path), "--tokenizer", "bytes", *prompts, *more]
        )
        *_, last = done.stderr.splitlines()
        assert done.exit_code == 1 and not done.stdout, done.output
        assert last.startswith("fusedops: error: ") and "for prompt 1 at position 3" in last
