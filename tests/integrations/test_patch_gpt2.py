"""GPT-2: a patched model trains and generates as the stock one, whatever hangs on its modules."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patch_testing import assert_close, assert_same_training, counted, gradients, patched_pair
from torch import nn

import fusedops
from fusedops.integrations import describe

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2 import modeling_gpt2
from transformers.pytorch_utils import Conv1D

IDS = torch.arange(2 * 16).remainder(97).view(2, 16)


def gpt2(*, dropout: float = 0.0, **options: object) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        vocab_size=97,
        n_positions=32,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=dropout,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        initializer_range=0.2,
        **options,
    )
    return GPT2LMHeadModel(config).train()


def pair(**options: object) -> tuple[nn.Module, nn.Module]:
    return patched_pair(gpt2(**options))


def loss(model: nn.Module) -> torch.Tensor:
    return model(IDS, labels=IDS).loss


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_training_matches_stock(level: str, autocast: bool) -> None:
    stock = gpt2()
    patched = copy.deepcopy(stock)
    fusedops.patch(patched, level=level)
    assert_same_training(patched, stock, loss, autocast=autocast)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "activation",
    [
        "gelu_new",
        "gelu",
        "gelu_python",
        "gelu_pytorch_tanh",
        "gelu_python_tanh",
        "gelu_fast",
        "gelu_accurate",
        "quick_gelu",
        "relu",
        "relu2",
        "silu",
        "swish",
        "linear",
    ],
)
@pytest.mark.usefixtures("own_products")
def test_every_known_activation(activation: str, autocast: bool) -> None:
    patched, stock = pair(activation_function=activation)
    assert describe(patched)["transformer.h.0.mlp"].op == "mlp"
    if autocast and activation == "relu":
        pytest.skip("its slope jumps: whichever way bfloat16 rounds an argument near 0 is right")
    assert_same_training(patched, stock, loss, autocast=autocast)


@pytest.mark.parametrize("activation", ["gelu_10", "tanh", "mish"])
@pytest.mark.usefixtures("own_products")
def test_unknown_activation_is_kept_and_reported(activation: str) -> None:
    stock = gpt2(activation_function=activation)
    patched = copy.deepcopy(stock)
    report = fusedops.patch(patched)
    entry = report["transformer.h.1.mlp"]
    assert not entry.replaced
    assert "no activation of linear_act" in entry.reason
    assert type(patched.transformer.h[0].mlp) is modeling_gpt2.GPT2MLP
    assert report["transformer.h.1.mlp.c_fc"].op == "linear_act"
    assert_same_training(patched, stock, loss)


def test_strict_names_what_cannot_be_replaced_and_leaves_the_model() -> None:
    model = gpt2(activation_function="mish")
    classes = [type(module) for module in model.modules()]
    with pytest.raises(fusedops.UnsupportedError, match=r"2 modules.*h\.0\.mlp: act is a Mish"):
        fusedops.patch(model, strict=True)
    assert [type(module) for module in model.modules()] == classes
    fusedops.patch(gpt2(), strict=True)


@pytest.mark.usefixtures("own_products")
def test_which_ops_run() -> None:
    patched, _ = pair()
    with counted() as calls:
        loss(patched).backward()
    expected = {
        "layer_norm": 3,
        "add_layer_norm": 2,
        "mlp": 2,
        "linear_act": 5,
        "attention": 2,
        "cross_entropy": 1,
    }
    backward = {f"{op}_backward": count for op, count in expected.items()}
    assert calls == expected | backward


DROPOUTS = ("attn.attn_dropout", "attn.resid_dropout", "mlp.dropout")


@pytest.mark.usefixtures("own_products")
def test_report_tells_op_and_backend_of_every_module() -> None:
    report = fusedops.patch(gpt2())
    kept = {entry.name for entry in report.kept}
    dropouts = {f"transformer.h.{i}.{name}" for i in (0, 1) for name in DROPOUTS}
    assert kept == {"transformer.wte", "transformer.wpe", "transformer.drop", *dropouts}
    block = report["transformer.h.0"]
    assert block.op == "add_layer_norm"
    assert block.backend.startswith(fusedops.resolve("gelu", torch.ones(1), "none").backend)
    assert report.num_replaced == len(report.modules) - len(kept)
    assert repr(report) == "PatchReport(GPT2LMHeadModel, level='O2', 23 of 32 modules replaced)"
    assert "transformer.h.*.mlp (x2)" in str(report)


def test_patching_twice_and_changing_the_level() -> None:
    model = gpt2()
    first = fusedops.patch(model)
    classes = [type(module) for module in model.modules()]
    assert fusedops.patch(model) == first
    assert [type(module) for module in model.modules()] == classes
    fusedops.patch(model, level="O1")
    assert type(model.transformer.h[0].mlp) is modeling_gpt2.GPT2MLP
    fusedops.patch(model, level="O0")
    assert all(type(module).__module__.split(".")[0] != "fusedops" for module in model.modules())


def test_unpatch_restores_to_the_bit_and_leaves_other_models_alone() -> None:
    patched, stock = pair()
    classes = [type(module) for module in stock.modules()]
    fusedops.unpatch(patched)
    assert [type(module) for module in patched.modules()] == classes
    before, after = gradients(stock, loss), gradients(patched, loss)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_dict_goes_both_ways() -> None:
    patched, stock = pair()
    assert list(patched.state_dict()) == list(stock.state_dict())
    trained = gpt2()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    patched.load_state_dict(trained.state_dict())
    assert_close(patched(IDS).logits, trained(IDS).logits)
    fresh = gpt2()
    fresh.load_state_dict(patched.state_dict())
    assert torch.equal(fresh(IDS).logits, trained(IDS).logits)


def test_embeddings_stay_tied_and_parameters_the_same_objects() -> None:
    model = gpt2()
    parameters = dict(model.named_parameters())
    fusedops.patch(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("child", ["c_fc", "act", "c_proj"])
@pytest.mark.usefixtures("own_products")
def test_a_hook_inside_the_mlp_fires_and_the_mlp_steps_aside(child: str) -> None:
    patched, stock = pair()
    seen = {}
    for model in (patched, stock):
        module = getattr(model.transformer.h[0].mlp, child)
        handle = module.register_forward_hook(
            lambda module, args, output, model=model: seen.__setitem__(model, output)
        )
        loss(model).backward()
        if model is patched:
            entry = describe(patched)["transformer.h.0.mlp"]
            assert entry.replaced == (child == "c_proj")
            prefix = "linear_act alone" if child == "c_proj" else "steps aside now"
            assert entry.reason == f"{prefix}: {child} has hooks"
            handle.remove()
    assert_close(seen[patched], seen[stock])
    with counted() as calls:
        loss(patched)
    assert calls["mlp"] == 2


def test_backward_hooks_fire_with_the_stock_gradients() -> None:
    names = [
        "transformer.h.0.mlp.c_fc",
        "transformer.h.0.mlp",
        "transformer.h.0.attn",
        "transformer.h.1.ln_2",
        "transformer.h.1.attn.resid_dropout",
        "transformer.h.1",
        "lm_head",
    ]
    patched, stock = pair()
    seen: list[list[torch.Tensor]] = [[], []]
    for model, found in zip((patched, stock), seen, strict=True):
        for name in names:
            model.get_submodule(name).register_full_backward_hook(
                lambda module, grad_input, grad_output, found=found: found.append(grad_output[0])
            )
        loss(model).backward()
    assert len(seen[0]) == len(names)
    for actual, expected in zip(*seen, strict=True):
        assert_close(actual, expected)


def test_a_forward_hook_may_change_the_output() -> None:
    patched, stock = pair()
    for model in (patched, stock):
        for name in ("transformer.h.0.ln_2", "transformer.h.1.attn.c_attn", "transformer.h.1.mlp"):
            model.get_submodule(name).register_forward_hook(lambda module, args, output: output * 2)
    assert_close(patched(IDS).logits, stock(IDS).logits)


def test_hooks_on_all_modules_fire() -> None:
    patched, stock = pair()
    counts = []
    for model in (patched, stock):
        fired: list[nn.Module] = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output, fired=fired: fired.append(module)
        )
        model(IDS)
        handle.remove()
        counts.append(len(fired))
    assert counts[0] == counts[1]


def test_attentions_and_hidden_states_are_recorded() -> None:
    patched, stock = pair(attn_implementation="eager", dropout=1.0)
    found, expected = (
        model(IDS, output_attentions=True, output_hidden_states=True) for model in (patched, stock)
    )
    for kind in ("attentions", "hidden_states"):
        assert len(found[kind]) == len(expected[kind])
        for actual, wanted in zip(found[kind], expected[kind], strict=True):
            assert_close(actual, wanted)


class _Adapted(nn.Module):
    """What an adapter library puts in a linear layer's place."""

    def __init__(self, base: nn.Module, out_features: int) -> None:
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.full((out_features,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usefixtures("own_products")
def test_an_adapter_in_a_childs_place_is_called(when: str) -> None:
    patched, stock = gpt2(), gpt2()
    if when == "after":
        fusedops.patch(patched)
    for model in (patched, stock):
        mlp = model.transformer.h[0].mlp
        assert isinstance(mlp.c_fc, Conv1D)
        mlp.c_fc = _Adapted(mlp.c_fc, 256)
    if when == "before":
        report = fusedops.patch(patched)
        assert report["transformer.h.0.mlp"].reason == "c_fc is a _Adapted"
        assert report["transformer.h.1.mlp"].replaced
    assert_same_training(patched, stock, loss)


def test_a_parametrization_is_applied() -> None:
    patched, stock = pair()
    for model in (patched, stock):
        nn.utils.parametrizations.weight_norm(model.transformer.h[0].mlp.c_proj)
        nn.utils.parametrizations.weight_norm(model.transformer.h[1].attn.c_attn)
    assert_same_training(patched, stock, loss)
    with pytest.raises(fusedops.UnsupportedError, match="h.0.mlp.c_proj is a Parametrized"):
        fusedops.unpatch(patched)


def test_dropout_in_training_and_none_in_evaluation() -> None:
    patched, stock = pair(dropout=0.5)
    first, again = gradients(patched, loss), gradients(patched, loss)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(loss(patched), loss(patched))
    assert_close(patched.eval()(IDS).logits, stock.eval()(IDS).logits)
    assert patched.training is False
    assert patched.transformer.h[0].attn.resid_dropout.training is False


def test_dropout_of_everything_leaves_the_residual_stream() -> None:
    patched, stock = pair(dropout=1.0)
    assert_close(patched(IDS).logits, stock(IDS).logits)


def test_only_the_dropouts_that_are_on_drop() -> None:
    patched, stock = pair(dropout=1.0)
    for model in (patched, stock):
        model.transformer.h[0].attn.resid_dropout.eval()
        model.transformer.h[1].mlp.dropout.p = 0.0
    assert_close(patched(IDS).logits, stock(IDS).logits)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.usefixtures("own_products")
def test_gradient_checkpointing_repeats_the_dropout(use_reentrant: bool) -> None:
    patched, _ = pair(dropout=0.5)
    whole = gradients(patched, loss)
    patched.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        patched.enable_input_require_grads()
    with counted() as calls:
        recomputed = gradients(patched, loss)
    assert calls["mlp"] == 4
    for name, expected in whole.items():
        assert_close(recomputed[name], expected)


@pytest.mark.parametrize("dropout", [0.0, 1.0])
@pytest.mark.usefixtures("own_products")
def test_compiles_into_one_graph(dropout: float) -> None:
    patched, stock = pair(dropout=dropout)
    torch._dynamo.reset()
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    logits = compiled(IDS).logits
    with counted() as calls:
        logits = compiled(IDS).logits
        logits.square().mean().backward()
    assert calls["mlp"] == calls["mlp_backward"] == 2
    expected = stock(IDS).logits
    expected.square().mean().backward()
    assert_close(logits, expected)
    for parameter, other in zip(patched.parameters(), stock.parameters(), strict=True):
        assert_close(parameter.grad, other.grad)


def test_padding_and_generation() -> None:
    patched, stock = pair()
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    for model in (patched, stock):
        model.eval()
    assert_close(
        patched(IDS, attention_mask=mask).logits[mask.bool()],
        stock(IDS, attention_mask=mask).logits[mask.bool()],
    )
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens, expected = (
        model.generate(IDS[:, :6], attention_mask=mask[:, :6], **options)
        for model in (patched, stock)
    )
    assert torch.equal(tokens, expected)


def test_cross_attention_blocks_keep_their_own_forward() -> None:
    patched, stock = pair(add_cross_attention=True)
    encoded = torch.randn(2, 5, 64)
    logits, expected = (
        model(IDS, encoder_hidden_states=encoded).logits for model in (patched, stock)
    )
    assert_close(logits, expected)


def test_deepcopy_is_patched_and_independent() -> None:
    patched, stock = pair()
    twin = copy.deepcopy(patched)
    assert type(twin.transformer.h[0]) is type(patched.transformer.h[0])
    fusedops.unpatch(patched)
    assert_same_training(twin, stock, loss)


def test_saved_model_loads_in_another_process(tmp_path: Path) -> None:
    patched, stock = pair()
    torch.save(patched, tmp_path / "model.pt")
    program = (
        "import sys, torch; "
        "model = torch.load(sys.argv[1], weights_only=False); "
        "ids = torch.arange(32).remainder(97).view(2, 16); "
        "torch.save(model(ids).logits, sys.argv[2]); "
        "import fusedops; assert fusedops.counters(); fusedops.unpatch(model); "
        "fusedops.reset_counters(); model(ids); assert not fusedops.counters()"
    )
    command = [sys.executable, "-c", program, tmp_path / "model.pt", tmp_path / "logits.pt"]
    subprocess.run([str(part) for part in command], check=True, timeout=120)
    assert_close(torch.load(tmp_path / "logits.pt"), stock(IDS).logits)


def test_save_pretrained_is_read_by_stock(tmp_path: Path) -> None:
    patched, stock = pair()
    patched.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["GPT2LMHeadModel"]
    assert torch.equal(loaded.train()(IDS).logits, stock(IDS).logits)


def test_accelerate_offload_still_moves_the_weights() -> None:
    accelerate = pytest.importorskip("accelerate")
    patched, stock = pair()
    fused = patched(IDS).logits
    accelerate.cpu_offload(patched, execution_device=torch.device("cpu"))
    assert patched.transformer.h[0].mlp.c_fc.weight.is_meta
    assert_close(patched(IDS).logits, fused)
    assert_close(fused, stock(IDS).logits)
