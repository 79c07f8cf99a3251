"""Models of transformers, loaded and saved: equal logits, and on ranks each part by who has it."""

from __future__ import annotations

import copy
import functools
import json
import sys
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_process import full_tensor
from safetensors.torch import load_file, save_file

import fusedops
from fusedops import UnsupportedError
from fusedops._core import dtypes
from fusedops.models import (
    TINY,
    ParallelConfig,
    TrainEngine,
    Transformer,
    fill_huggingface,
    from_config,
    load_huggingface,
    parallelize,
    preset,
    save_huggingface,
    to_config,
)
from fusedops.models.config import describe
from fusedops.models.huggingface import weights
from fusedops.models.huggingface.families import FAMILIES as FAMILY_ROWS
from fusedops.models.huggingface.families import ROUTER_BIAS
from fusedops.testing import threads

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA = SMALL | {"intermediate_size": 96, "num_key_value_heads": 2}
QWEN = LLAMA | {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERTS |= {"norm_topk_prob": True}
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 20, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT |= {"num_experts_per_tok": 3, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
LATENT |= {"n_shared_experts": 2, "num_key_value_heads": 4, "intermediate_size": 96}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3}
YARN |= {"original_max_position_embeddings": 16, "beta_fast": 4.0}
# The configuration and its model.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "bert": ("BertConfig", "BertForMaskedLM", SMALL | {"intermediate_size": 96}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"rope_parameters": STRETCHED}),
    "mistral": ("MistralConfig", "MistralForCausalLM", LLAMA | {"sliding_window": 5}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", QWEN | {"tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", LLAMA | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN | EXPERTS),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        SMALL | LATENT | {"rope_parameters": YARN},
    ),
}


def _theirs(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config, model, sizes = FAMILIES[name]
    values = getattr(transformers, config)(**sizes | more)
    # The other form of experts has no float64.
    made = getattr(transformers, model)._from_config(values, experts_implementation="eager").eval()
    for parameter in made.parameters():  # biases too, and norms that are not 1
        torch.nn.init.normal_(parameter, std=0.2)
    for key, buffer in made.named_buffers():
        if key.endswith(ROUTER_BIAS):
            torch.nn.init.normal_(buffer, std=0.2)
    return made


def _tokens() -> torch.Tensor:
    return torch.randint(256, (2, 23), generator=torch.Generator().manual_seed(1))


def _assert_same_logits(ours: Any, theirs: Any) -> None:
    tokens = _tokens()
    with torch.no_grad():
        expected, actual = theirs(tokens).logits, ours(tokens)
        truth = theirs.double()(tokens).logits
    theirs.float()
    depth = 2 * theirs.config.hidden_size
    budget = dtypes.rms_budget(expected, truth, torch.float32, depth=depth)
    assert dtypes.rms(actual.double() - truth) <= budget
    assert dtypes.rms(truth) > 100 * budget


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_theirs_both_ways(name: str, tmp_path: Path) -> None:
    theirs = _theirs(name)
    ours = load_huggingface(theirs).eval()
    assert ours.config.parameters().total == sum(p.numel() for p in theirs.parameters())
    _assert_same_logits(ours, theirs)
    # Written by them, in several files, and read by us.
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    again = load_huggingface(tmp_path / "theirs")
    assert again.config == ours.config
    for (key, one), other in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), key
    # Written by us, in several files as well, and read by them.
    save_huggingface(ours, tmp_path / "ours", max_file_bytes=100_000)
    back = type(theirs).from_pretrained(tmp_path / "ours", experts_implementation="eager")
    expected = theirs.state_dict()
    assert back.state_dict().keys() == expected.keys()
    for key, value in back.state_dict().items():
        assert torch.equal(value, expected[key]), key
    with torch.no_grad():
        assert torch.equal(back.eval()(_tokens()).logits, theirs(_tokens()).logits)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_theirs_with_padding(name: str, tied: bool, tmp_path: Path) -> None:
    pad = -249  # from the end, as torch.nn.Embedding counts
    tokens, slope = _tokens(), torch.randn(2, 23, 256, generator=torch.Generator().manual_seed(2))
    tokens[:, ::3] = 256 + pad
    theirs = _theirs(name, tie_word_embeddings=tied, pad_token_id=pad)
    save_huggingface(load_huggingface(theirs), tmp_path)
    ours = load_huggingface(tmp_path).eval()
    _assert_same_logits(ours, theirs)

    def gradients(logits: torch.Tensor, model: Any) -> dict[str, Any]:
        logits.backward(slope.to(logits.dtype))
        return {key: parameter.grad for key, parameter in model.named_parameters()}

    actual = gradients(ours(tokens), ours)
    expected = gradients(theirs(tokens).logits, theirs)
    theirs.double().zero_grad()
    truth = gradients(theirs(tokens).logits, theirs)
    for row in FAMILY_ROWS[name].rows(ours.config):
        if row.ours[0].endswith(ROUTER_BIAS):  # a buffer
            continue
        held = row.twin or row.loaded
        one_each, exact_each = (
            [grads[held]] if held else row.read([grads[name] for name in row.theirs])
            for grads in (expected, truth)
        )
        for key, one, exact in zip(row.ours, one_each, exact_each, strict=True):
            depth = 4 * theirs.config.hidden_size
            budget = dtypes.rms_budget(one, exact, torch.float32, depth=depth)
            assert dtypes.rms(actual.pop(key).double() - exact) <= budget, key
    assert not actual
    # A tied head gives the row a gradient; GPT-2's embedding has no padding.
    words = ours.embedding.tokens.weight.grad
    assert words is not None and bool(words[pad].any()) is (tied or name == "gpt2")


def test_untied_bert_reads_the_bias_of_either_name(tmp_path: Path) -> None:
    theirs = _theirs("bert", tie_word_embeddings=False)
    biases = theirs.cls.predictions
    assert not torch.equal(biases.bias, biases.decoder.bias)
    theirs.save_pretrained(tmp_path)
    assert torch.equal(load_huggingface(tmp_path).head.bias, biases.decoder.bias)
    # As transformers 4 saved it, where the decoder's bias was the shared one.
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("cls.predictions.decoder.bias")
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_huggingface(tmp_path)
    assert torch.equal(found.head.bias, biases.bias)
    save_huggingface(found, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("bias", "decoder.bias"):
        assert torch.equal(tensors[f"cls.predictions.{name}"], biases.bias), name


@pytest.mark.parametrize("name", ["gpt2", "bert", "qwen3"])
def test_unlike_tensors_are_not_tied(name: str, tmp_path: Path) -> None:
    theirs = _theirs(name, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    untied = file.read_text()
    file.write_text(json.dumps(json.loads(untied) | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="set its tie_word_embeddings to false"):
        load_huggingface(tmp_path)
    with torch.no_grad():
        expected = type(theirs).from_pretrained(tmp_path).eval()(_tokens()).logits
        assert torch.equal(expected, theirs(_tokens()).logits)  # as the message says
    file.write_text(untied)
    _assert_same_logits(load_huggingface(tmp_path).eval(), theirs)
    # Equal ones may be stored under both names.
    tied = _theirs(name, tie_word_embeddings=True)
    weights = {key: value.clone() for key, value in tied.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    tied.config.save_pretrained(tmp_path)
    _assert_same_logits(load_huggingface(tmp_path).eval(), tied)


def test_a_patched_model_loads() -> None:
    theirs = _theirs("mixtral")
    before = load_huggingface(theirs).state_dict()
    fusedops.patch(theirs)
    after = load_huggingface(theirs).state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("limit", [10**9, 100_000])
def test_saving_again_leaves_files_of_the_last_call_alone(limit: int, tmp_path: Path) -> None:
    model = Transformer(TINY["tiny-llama"], dtype=torch.bfloat16)
    save_huggingface(model, tmp_path / "new", max_file_bytes=limit)
    new = {path.name for path in (tmp_path / "new").iterdir()}
    folder = tmp_path / "old"
    save_huggingface(model, folder, max_file_bytes=50_000)
    assert len(list(folder.glob("model-*.safetensors"))) > len(new) - 2
    foreign = {"notes.txt", "model-of-mine.safetensors", "pytorch_model.bin", "tokenizer.json"}
    for name in {*foreign, "model.safetensors.part7"}:
        (folder / name).touch()
    save_huggingface(model, folder, max_file_bytes=limit)
    assert {path.name for path in folder.iterdir()} == new | foreign
    assert next(load_huggingface(folder).parameters()).dtype == torch.bfloat16


def test_old_names_are_read(tmp_path: Path) -> None:
    ours = load_huggingface(_theirs("gpt2"))
    save_huggingface(ours, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    # As the first GPT-2 was published: no prefix, and the mask among the weights.
    old = {key.removeprefix("transformer."): value for key, value in tensors.items()}
    save_file(old | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, file)
    found = load_huggingface(tmp_path)
    assert torch.equal(found.norm.weight, ours.norm.weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "has no lm_head.weight"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "also more"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}),
            r"model.norm.weight must be \[64\] for norm.weight, got \[65\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    save_huggingface(Transformer(TINY["tiny-llama"]), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        load_huggingface(tmp_path)


def test_what_cannot_be_read_or_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is downloaded"):
        load_huggingface("gpt2")
    with pytest.raises(TypeError, match="source must be a folder or a model"):
        load_huggingface(3)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps(to_config(TINY["tiny-gpt2"])))
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        load_huggingface(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_huggingface(tmp_path)
    index = {"weight_map": {"transformer.wte.weight": "more.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="cannot read .*more.safetensors"):
        load_huggingface(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match="cannot read transformer.wte.weight from"):
        load_huggingface(tmp_path)
    for name, what in (("tiny-pangu", "query_layer"), ("tiny-alibi", "alibi")):
        with pytest.raises(UnsupportedError, match=what):
            save_huggingface(Transformer(TINY[name]), tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_huggingface(Transformer(TINY["tiny-llama"]), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UnsupportedError, match="need the package safetensors: pip install"):
        load_huggingface(tmp_path)


@pytest.mark.parametrize(
    "name", ["gpt2", "bert-large", "llama3.2-1b", "qwen3-0.6b", "qwen3-30b-a3b", "mixtral-8x7b"]
)
def test_a_preset_and_its_configuration_are_the_same(name: str) -> None:
    values = to_config(preset(name))
    assert to_config(from_config(values)) == values
    config = transformers.AutoConfig.for_model(**copy.deepcopy(values))
    assert to_config(from_config(config)) == values


@pytest.mark.parametrize("name", FAMILIES)
def test_an_entry_that_is_missing_has_their_default(name: str) -> None:
    kind = getattr(transformers, FAMILIES[name][0])
    values = kind(num_attention_heads=128 if name == "deepseek_v3" else 64).to_dict()
    refused = []
    for entry in values.keys() - {"model_type"}:
        rest = {key: value for key, value in values.items() if key != entry}
        try:
            ours = from_config(rest)
        except ValueError as error:
            assert str(error) == f"from_config: the configuration has no {entry}"
            refused.append(entry)
            continue
        assert describe(ours) == describe(from_config(kind(**rest))), entry
    assert len(refused) < 10  # sizes


@pytest.mark.parametrize(
    ("entry", "value", "says"),
    [
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config must be null, got"),
        ("rope_scaling", "llama3", "rope_parameters must be a table or null, got 'llama3'"),
        ("rope_scaling", {"rope_type": "proportional"}, "rope_type must be one of 'default'"),
        ("use_sliding_window", True, "use_sliding_window must be false, got True"),
    ],
)
def test_what_is_not_computed_is_refused_unless_sizes_are_asked(
    entry: str, value: Any, says: str
) -> None:
    values = to_config(preset("qwen3-0.6b")) | {entry: value}
    with pytest.raises(ValueError, match=says):
        from_config(values)
    assert from_config(values, sizes_only=True).parameters() == preset("qwen3-0.6b").parameters()


LAYOUTS = {
    "zero3": ("tiny-llama", {"dp": 2, "zero": 3}),
    "tp2": ("tiny-gpt2", {"tp": 2}),
    "tp2-zero1": ("tiny-qwen3", {"tp": 2, "dp": 2, "zero": 1}),
    "pp2": ("tiny-gpt2", {"pp": 2, "microbatches": 2}),
    "ep2": ("tiny-mixtral", {"dp": 2, "ep": 2}),
}


def _filled(rank: int, name: str, values: dict[str, Any], folder: str) -> TrainEngine:
    fill = functools.partial(fill_huggingface, source=folder)
    model = Transformer(preset(name), device="meta")
    return parallelize(model, ParallelConfig(**values), weights=fill)


def _loaded(rank: int, name: str, values: dict[str, Any], folder: str) -> list[str]:
    engine = _filled(rank, name, values, folder)
    expected = dict(load_huggingface(folder).named_parameters())
    for key, parameter in engine.model.named_parameters():
        assert torch.equal(full_tensor(parameter), expected[key].detach()), key
    assert not any(buffer.any() for buffer in engine.model.buffers() if buffer.dim() == 1)
    save_huggingface(engine, f"{folder}/again")
    return [key for key, _ in engine.model.named_parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_process_has_its_part(layout: str, tmp_path: Path) -> None:
    name, values = LAYOUTS[layout]
    whole = Transformer(preset(name))
    save_huggingface(whole, tmp_path)
    ranks = ParallelConfig(**values).sizes.ranks
    found = threads.run(_loaded, ranks, name, values, str(tmp_path))
    assert set().union(*found) == {key for key, _ in whole.named_parameters()}
    saved = load_huggingface(tmp_path / "again")  # gathered from all of them
    for (key, one), other in zip(whole.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(one, other), key


@pytest.mark.parametrize("layout", ["pp2", "zero3"])
def test_no_process_holds_more_than_one_row(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, peaks = Counter[int](), Counter[int]()  # bytes of the tensors that a rank has read
    get = weights._Checkpoint._tensor

    def read(files: Any, name: str) -> torch.Tensor:
        tensor, rank = get(files, name), dist.get_rank()
        held[rank] += tensor.nbytes
        peaks[rank] = max(peaks[rank], held[rank])
        weakref.finalize(tensor, lambda size: held.subtract({rank: size}), tensor.nbytes)
        return tensor

    monkeypatch.setattr(weights._Checkpoint, "_tensor", read)
    name, whole = "tiny-gpt2", Transformer(preset("tiny-gpt2"))
    save_huggingface(whole, tmp_path)
    threads.run(_filled, 2, name, LAYOUTS[layout][1], str(tmp_path))
    sizes = [parameter.nbytes for parameter in whole.parameters()]
    for rank in range(2):
        assert 0 < peaks[rank] <= 3 * max(sizes)  # query, key and value are one tensor there
    assert max(sizes) < sum(sizes) / 3


def test_another_model_is_refused(tmp_path: Path) -> None:
    save_huggingface(Transformer(preset("tiny-llama")), tmp_path)
    with pytest.raises(ValueError, match="fill_huggingface: model must be of"):
        fill_huggingface(Transformer(replace(preset("tiny-llama"), num_layers=3)), tmp_path)
