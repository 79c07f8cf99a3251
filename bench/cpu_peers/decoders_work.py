"""Greedy generation by a Llama of 220 M parameters with random weights, one sequence.

12 layers, 1024 wide, 16 heads, feed-forward 2816, 32,000 words, head not tied to the embedding.
Prefill is the time from a prompt to its first new token, decoding that of ``STEPS`` more tokens.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from ways import Contest, Running, Way

import fusedops
from fusedops.generation import Decoder, stream
from fusedops.models import load_huggingface

WORDS, HEADS, LAYERS, HIDDEN, FEED_FORWARD = 32_000, 16, 12, 1024, 2816
PROMPTS, DECODED, STEPS = (64, 512), 64, 32
# What ``fusedops.quantize`` is asked for, and the type of llama.cpp that is compared with it.
QUANTIZED = {"int8": "Q8_0", "int4": "Q4_0"}

# Starts a generation of so many tokens: the first is there when the first ``next`` returns.
Starter = Callable[[list[int], int], Iterator[Any]]


@functools.cache
def llama(dtype: torch.dtype, patched: bool = False) -> nn.Module:
    """Return the model of transformers; the weights are the same in all processes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    if patched:
        fusedops.patch(model)
    return model


@functools.cache
def transformer(dtype: torch.dtype, quantized: str | None) -> nn.Module:
    """Return our model with the same weights."""
    model = load_huggingface(llama(dtype))
    if quantized is not None:  # as ``fusedops generate --weights`` does
        model.join_projections()
        fusedops.quantize(model, quantized, head="int8")
    return model


def prompt(tokens: int) -> list[int]:
    """Return a prompt of random tokens."""
    return torch.randint(3, WORDS, (tokens,), generator=torch.Generator()).tolist()


def running(start: Starter, logits: torch.Tensor, tokens: int, steps: int) -> Running:
    """Return what times the prefill of a prompt, or the decoding after it."""
    ids = prompt(tokens)
    if not steps:
        return Running(lambda _: next(start(ids, 1)), [logits])

    def prefilled() -> Iterator[Any]:
        generation = start(ids, 1 + steps)
        next(generation)
        return generation

    def decode(generation: Iterator[Any]) -> None:
        for _ in range(steps):
            next(generation)

    return Running(decode, [logits], prefilled)


def in_fusedops(
    dtype: torch.dtype, tokens: int, steps: int, quantized: str | None = None
) -> Running:
    """Generate with ``fusedops.generation``."""
    model = transformer(dtype, quantized)
    logits = Decoder(model, tokens).prefill([torch.tensor(prompt(tokens))])

    def start(ids: list[int], new: int) -> Iterator[Any]:
        return stream(model, ids, tokens=new)

    return running(start, logits[0], tokens, steps)


def in_transformers(dtype: torch.dtype, tokens: int, steps: int, patched: bool = False) -> Running:
    """Generate with transformers: ``generate`` continues from the cache of a prefill."""
    from transformers import DynamicCache

    model = llama(dtype, patched)
    with torch.no_grad():
        logits = model(torch.tensor([prompt(tokens)]), logits_to_keep=1).logits[0, -1]

    def generate(ids: list[int], new: int, cache: Any = None) -> torch.Tensor:
        rows = torch.tensor([ids])
        return model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            past_key_values=cache,
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )

    ids = prompt(tokens)
    if not steps:
        return Running(lambda _: generate(ids, 1), [logits])

    def prefilled() -> Any:
        cache = DynamicCache()
        with torch.no_grad():
            model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
        return cache

    following = [*ids, int(logits.argmax())]
    return Running(lambda cache: generate(following, steps, cache), [logits], prefilled)


def write_gguf(path: Path, kind: str) -> None:
    """Write the model's weights as llama.cpp reads them; ``kind``: F32, BF16, Q8_0 or Q4_0.

    Norms stay in float32, and the head in Q8_0 where the others have four bits.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(WORDS)])
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types([gguf.TokenType.NORMAL] * WORDS)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    types = gguf.GGMLQuantizationType
    for name, tensor in llama(torch.float32).state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # halves -> pairs of the rotation
            tensor = tensor.view(HEADS, 2, -1, HIDDEN).transpose(1, 2).reshape(tensor.shape)
        chosen = "F32" if tensor.dim() == 1 else kind
        chosen = "Q8_0" if chosen == "Q4_0" and name == "lm_head.weight" else chosen
        data = gguf.quants.quantize(tensor.numpy(), types[chosen])
        place = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(place, data, raw_dtype=types[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def llama_cpp(kind: str) -> Any:
    """Return the model of llama.cpp, whose cache of keys and values has its own default, F16."""
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path, kind)
        options = {"n_threads": threads, "n_threads_batch": threads, "use_mmap": False}
        return Llama(str(path), n_ctx=1024, verbose=False, **options)


def in_llama_cpp(kind: str, tokens: int, steps: int) -> Running:
    """Generate with llama.cpp, through its Python package."""
    model = llama_cpp(kind)
    model.reset()
    model.eval(prompt(tokens))
    pointer = model._ctx.get_logits_ith(-1)
    logits = torch.from_numpy(numpy.ctypeslib.as_array(pointer, shape=(WORDS,)).copy())

    def start(ids: list[int], new: int) -> Iterator[Any]:
        model.reset()
        return model.generate(ids, temp=0.0, top_k=1)

    return running(start, logits, tokens, steps)


def contests() -> list[Contest]:
    """Return a contest for each prompt and dtype; weights of fewer bits run beside bfloat16."""
    works = [(f"prefill of {tokens} tokens", tokens, 0) for tokens in PROMPTS]
    works.append((f"decoding of {STEPS} tokens after {DECODED}", DECODED, STEPS))
    found = []
    for title, tokens, steps in works:
        for dtype, kind in ((torch.float32, "F32"), (torch.bfloat16, "BF16")):
            given = dtype, tokens, steps
            decoder_ways = {
                "fusedops": Way(partial(in_fusedops, *given), "fusedops"),
                "patched": Way(partial(in_transformers, *given, True), "fusedops"),
                "transformers": Way(partial(in_transformers, *given), "transformers"),
                f"llama.cpp, {kind}": _llama_cpp(kind, tokens, steps),
            }
            for name, kind in QUANTIZED.items() if dtype == torch.bfloat16 else ():
                ours = f"fusedops, {name}" if hasattr(fusedops, "quantize") else "fusedops"
                if ours != "fusedops":
                    decoder_ways[ours] = Way(partial(in_fusedops, *given, name), "fusedops", name)
                decoder_ways[f"llama.cpp, {kind}"] = _llama_cpp(kind, tokens, steps, ours)
            work, reference = f"Llama of 220 M, {title}", partial(_reference, tokens)
            found.append(Contest(work, str(dtype)[6:], reference, decoder_ways, "fusedops", steps))
    return found


def _llama_cpp(kind: str, tokens: int, steps: int, ours: str = "fusedops") -> Way:
    make = partial(in_llama_cpp, kind, tokens, steps)
    return Way(make, "llama-cpp-python", kind, ours, process="llama-cpp-python")


def _reference(tokens: int) -> list[torch.Tensor]:
    return list(in_transformers(torch.float32, tokens, 0).outputs)
