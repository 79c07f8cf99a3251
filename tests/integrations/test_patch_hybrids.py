"""Recurrent mixers: what is tested of every type is in ``test_patch_families.py``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import HYBRIDS, IDS, Family
from patch_testing import assert_all_close, assert_close, assert_same_training, counted
from torch import nn

import fusedops
from fusedops.integrations import describe
from fusedops.integrations.hf.rules.mixers import FUNCTIONS

MIXERS = ("causal_conv1d", "gated_delta_rule", "selective_state_space", "selective_scan")
pytestmark = pytest.mark.skipif(not HYBRIDS, reason="a transformers before 5.17")
all_hybrids = pytest.mark.parametrize("family", HYBRIDS.values(), ids=HYBRIDS)


def test_the_table_has_every_type_with_such_functions() -> None:
    """Including those that no table of the package names: their code is in each file."""
    defines = re.compile(rf"^def ({'|'.join(FUNCTIONS)})\(", re.MULTILINE)
    folder = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if defines.search(path.read_text(encoding="utf-8"))
    }
    files = {sys.modules[type(family.model()).__module__].__file__ for family in HYBRIDS.values()}
    listed = {Path(str(file)).parent.name for file in files}
    assert len(listed) == 20
    assert listed == found or transformers.__version__ >= "5.18"  # later ones have further types


def mixers(model: nn.Module) -> dict[str, str]:
    """Return the notes of the modules that run ops of mixers."""
    entries = describe(model).replaced
    return {entry.name: entry.reason for entry in entries if set(entry.op.split(", ")) & {*MIXERS}}


@all_hybrids
def test_generation_reads_and_updates_the_states(family: Family) -> None:
    patched, stock = (model.eval() for model in family.pair())
    steps, given = 5, {name: family.prompt(stock)[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with counted() as calls:
        found = patched.generate(**given, **options)
    expected = stock.generate(**given, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert_all_close(found.logits, expected.logits)
    for op in family.ops:
        if op in MIXERS:
            assert calls[op] == steps * family.ops[op]


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "Mamba2", "FalconMamba", "Lfm2"])
def test_a_prompt_in_parts(name: str) -> None:
    outputs = []
    for model in HYBRIDS[name].pair():
        model.eval()
        first = model(IDS[:, :6], use_cache=True)
        cache = {"past_key_values": first.get("past_key_values", first.get("cache_params"))}
        if "cache_params" in first:
            cache = {"cache_params": first.cache_params}
        second = model(IDS[:, 6:11], use_cache=True, **cache)
        third = model(IDS[:, 11:], use_cache=True, **cache)
        outputs.append([output.logits for output in (first, second, third)])
    assert_all_close(*outputs)


@all_hybrids
def test_bfloat16(family: Family) -> None:
    patched, stock = (model.to(torch.bfloat16) for model in family.pair())
    exact = family.model().double()
    with counted() as calls:
        found = family.logits(patched)
    assert {op for op in family.ops if op in MIXERS} <= set(calls)
    expected, wanted = family.logits(stock), family.logits(exact)
    assert found.dtype == expected.dtype
    error = (expected.double() - wanted).norm()
    assert (found.double() - wanted).norm() <= 1.5 * error


FUNCTION_OF = {
    "Qwen3Next": "torch_chunk_gated_delta_rule",
    "KimiLinear": "chunk_kimi_delta_attention",
    "Mamba2": "mamba2_chunk_scan",
    "Zamba": "mamba_selective_scan",
    "Lfm2": "causal_conv1d_fn",
}


@pytest.mark.parametrize("name", FUNCTION_OF)
def test_a_function_of_the_user_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, function = HYBRIDS[name], FUNCTION_OF[name]
    patched, stock = family.pair()
    expected, op = family.logits(stock), FUNCTIONS[function].op
    file: Any = sys.modules[type(stock).__module__]
    original = getattr(file, function)

    @functools.wraps(original)
    def doubled(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result * 2

    with monkeypatch.context() as change:
        change.setattr(file, function, doubled)
        with counted() as calls:
            found = family.logits(patched)
        changed = family.logits(stock)
        assert_close(found, changed)
        assert not torch.allclose(changed, expected)
        assert calls[op] == 0
        reasons = [entry.reason for entry in describe(patched).modules]
        assert any(f"{function} was replaced by" in reason for reason in reasons)
    with counted() as calls:
        assert_close(family.logits(patched), expected)
    assert calls[op] > 0


@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba", "Mamba"])
def test_a_call_with_packed_sequences_is_left_to_stock(name: str) -> None:
    """Which ignores where they end, or (5.24) refuses them."""
    patched, stock = HYBRIDS[name].pair()
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    indices = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "seq_idx": indices}
    packed |= {"max_length_q": 7, "max_length_k": 7, "position_ids": torch.arange(12)[None]}
    try:
        expected = stock(IDS[:1], **packed).logits
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            patched(IDS[:1], **packed)
    else:
        assert_close(patched(IDS[:1], **packed).logits, expected)


@pytest.mark.parametrize("options", [{"hidden_act": "gelu"}, {"linear_conv_kernel_dim": 9}])
def test_what_the_convolution_does_not_serve_is_in_the_report(options: dict[str, Any]) -> None:
    patched, stock = HYBRIDS["OlmoHybrid"].pair(**options)
    with counted() as calls:
        assert_same_training(patched, stock, HYBRIDS["OlmoHybrid"].loss)
    assert calls["causal_conv1d"] == 0 < calls["gated_delta_rule"]
    note = "its activation is 'gelu'" if "hidden_act" in options else "has the width 9"
    assert all(note in reason for reason in mixers(patched).values())


@pytest.mark.parametrize("before", [False, True])
def test_norms_of_falcon_h1_with_groups(before: bool) -> None:
    options = {"mamba_rms_norm": True, "mamba_norm_before_gate": before, "mamba_n_groups": 2}
    patched, stock = HYBRIDS["FalconH1"].pair(**options)
    with counted() as calls:
        assert_same_training(patched, stock, HYBRIDS["FalconH1"].loss)
    assert calls["gated_rms_norm"] == 2


@pytest.fixture
def edited_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Mamba's file with another scan, in a process with a package of kernels."""
    kernels = types.ModuleType("causal_conv1d")
    kernels.causal_conv1d_fn = lambda *args, **options: args[0]
    monkeypatch.setitem(sys.modules, "causal_conv1d", kernels)
    package = "transformers.models.mamba"
    source = Path(str(importlib.import_module(f"{package}.modeling_mamba").__file__))
    text = source.read_text(encoding="utf-8").replace("from ... ", "from transformers ")
    text = text.replace("from ...", "from transformers.").replace("from .", f"from {package}.")
    path = tmp_path / "modeling_edited.py"
    path.write_text(text.replace("= scan_output * F.silu(z)", "= scan_output * F.gelu(z)"))
    spec: Any = importlib.util.spec_from_file_location("modeling_edited", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "modeling_edited", module)
    spec.loader.exec_module(module)
    return module


def test_edited_code_and_kernels_of_other_packages_stay(edited_file: Any) -> None:
    stock = HYBRIDS["Mamba"].model()
    model = edited_file.MambaForCausalLM(stock.config).train()
    model.load_state_dict(stock.state_dict())
    expected = model(IDS).logits
    fusedops.patch(model)
    (note,) = set(mixers(model).values())
    assert "another mamba_selective_scan" in note
    assert "causal_conv1d_fn calls test_patch_hybrids" in note
    with counted() as calls:
        assert_close(model(IDS).logits, expected)
    assert not any(calls[op] for op in MIXERS)
    fusedops.unpatch(model)
    assert torch.equal(model(IDS).logits, expected)


def test_levels_and_undoing() -> None:
    model = HYBRIDS["Mamba2"].model()
    expected = model(IDS).logits
    report = fusedops.patch(model, level="O1")
    assert {entry.op for entry in report.replaced} == {"gated_rms_norm", "rms_norm"}
    assert len(mixers(model)) == 0
    fusedops.patch(model)
    assert len(mixers(model)) == 2
    fusedops.unpatch(model)
    assert torch.equal(model(IDS).logits, expected)
