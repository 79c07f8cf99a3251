"""A patched model follows every change of what its forward reads, one model type at a time.

A sweep runs the stock model once and notes the code that runs. Every function, method, default,
number, flag and table that this code reads is then changed, one at a time, and the patched model
must give what the changed stock model gives, or raise what it raises.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from families import KIMI, LFM2, MAMBA2, QWEN_DELTA, VISION, ZAMBA2, transformers
from patch_testing import TOLERANCE, distance
from torch import nn

import fusedops

LEVELS = ("O1", "O2", "O3")
FACTOR = 1.3
AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
    "speech": "AutoModelForSpeechSeq2Seq",
}
SIZES: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 32)
    | dict.fromkeys(("word_embed_proj_dim", "emb_dim", "conv_dim"), 32)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2)
    | dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 1)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "d_inner"), 48)
    | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_expert_intermediate_size"), 48)
    | dict.fromkeys(("shared_intermediate_size", "moe_intermediate_size"), 48)
    | dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64)
    | dict.fromkeys(("max_source_positions",), 16)
    | dict.fromkeys(("max_target_positions",), 64)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_key_value_heads"), 2)
    | {"vocab_size": 97, "image_size": 16, "patch_size": 4, "rotary_dim": 4, "num_mel_bins": 8}
    | {"q_lora_rank": 24, "kv_lora_rank": 16, "n_group": 2, "topk_group": 1}
    | {"first_k_dense_replace": 1, "sliding_window": 5, "query_pre_attn_scalar": 8}
)
# Functions of torch that everything in the process calls, the library's own code included.
PROCESS_WIDE = {
    *("arange", "empty", "full", "ones", "tensor", "zeros"),
    *("is_autocast_enabled", "is_grad_enabled"),
}
# Files of transformers whose functions many types call. Masks are made before any patched module.
SHARED = (
    "transformers.activations",
    "transformers.integrations.moe",
    "transformers.integrations.sdpa_attention",
    "transformers.loss.loss_utils",
    "transformers.pytorch_utils",
)


class ModelType(NamedTuple):
    """A model type in a size that runs in milliseconds."""

    task: str  # of AUTO_CLASSES
    name: str  # of the type in transformers
    options: dict[str, Any]  # of the configuration, after SIZES

    def model(self) -> Any:
        """Return a model in evaluation whose weights make every part count."""
        default = transformers.AutoConfig.for_model(self.name).to_dict()
        sizes = {
            key: value
            for key, value in SIZES.items()
            if type(default.get(key)) is int or (key == "num_key_value_heads" and key in default)
        }
        for key, value in default.items():
            if key.endswith("token_id") and isinstance(value, int) and value >= 97:
                sizes[key] = 2
        if self.task in ("seq2seq", "speech"):
            sizes |= {"decoder_start_token_id": 2, "pad_token_id": 0}
        config = transformers.AutoConfig.for_model(self.name, **(sizes | self.options))
        model = getattr(transformers, AUTO_CLASSES[self.task]).from_config(config).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                else:
                    parameter.normal_(std=1.5 / math.sqrt(parameter[0].numel()))
        return model

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of the model, labels included."""
        ids = torch.arange(5, 2 * 12 + 5).mul(7).remainder(91).add(5).view(2, 12)
        mask = torch.ones_like(ids)
        mask[1, 9:] = 0
        if self.task == "image":
            size = self.options.get("image_size", SIZES["image_size"])
            pixels = torch.sin(torch.arange(2.0 * 3 * size * size)).view(2, 3, size, size)
            return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
        if self.task == "speech":
            spectrum = torch.sin(torch.arange(2.0 * 8 * 32)).view(2, 8, 32)
            return {"input_features": spectrum, "labels": ids}
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}


class Change(NamedTuple):
    """One change of what a model reads."""

    place: str  # what the messages call it
    owner: Callable[[nn.Module], Any]  # returns what the attribute is set on, of a model
    name: str  # of the attribute
    value: Callable[[Any, Any], Any]  # from the owner and the value before

    @contextmanager
    def made(self, model: nn.Module) -> Iterator[None]:
        """Make the change, and undo it afterwards."""
        owner = self.owner(model)
        own = isinstance(owner, FunctionType) or self.name in vars(owner)
        raw = vars(owner).get(self.name, getattr(owner, self.name, None))
        setattr(owner, self.name, self.value(owner, raw))
        try:
            yield
        finally:
            if own:
                setattr(owner, self.name, raw)
            else:
                delattr(owner, self.name)


class Difference(NamedTuple):
    """A change that the patched model did not follow.

    It was made ``after`` the patch, ``before`` it, or before it and ``undone`` afterwards.
    """

    place: str
    level: str
    moment: str
    problem: str


# Tensors by name, or the error that a call raised.
Result = dict[str, torch.Tensor | None] | Exception


def run(model: Any, inputs: dict[str, torch.Tensor]) -> Result:
    """Return logits, loss, and the gradient of what enters the model."""
    inputs = dict(inputs)
    try:
        if "input_ids" in inputs:
            leaf = model.get_input_embeddings().weight
        else:
            name = next(iter(inputs))
            leaf = inputs[name] = inputs[name].clone().requires_grad_()
        torch.manual_seed(0)
        output = model(**inputs)
        logits, loss = output.logits, output.loss
        weights = torch.cos(torch.arange(float(logits.numel()))).view_as(logits)
        objective = (logits * weights).sum() + (0 if loss is None else loss)
        gradient = None
        if objective.requires_grad:
            (gradient,) = torch.autograd.grad(objective, leaf, allow_unused=True)
        return {"logits": logits.detach(), "loss": loss, "gradient": gradient}
    except Exception as error:  # whatever it is, the other model has to raise the same
        return error


def problem(patched: Result, stock: Result) -> str | None:
    """Return how two results differ, or ``None`` if they are the same."""
    if isinstance(patched, Exception) or isinstance(stock, Exception):
        if type(patched) is type(stock):
            return None
        return f"{_text(patched)} instead of {_text(stock)}"
    for name, expected in stock.items():
        actual = patched[name]
        if actual is None or expected is None or actual.shape != expected.shape:
            if actual is not expected:
                return f"{name}: another shape, or none"
        elif (size := distance(actual.detach(), expected.detach())) > TOLERANCE:
            return f"{name} differ by {size:.2g}"
    return None


def _text(result: Result) -> str:
    if isinstance(result, dict):
        return "a result"
    return f"{type(result).__name__}: {str(result).partition(chr(10))[0][:90]}"


# What is changed.


def another(value: Any, texts: bool = True) -> Any:
    """Return another value of the same type: other numbers and flags, and other texts if asked to.

    Tensors of floating-point numbers are scaled, others are reversed.
    """
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            return value * FACTOR
        return value.flip(-1) if value.dim() else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 0.3 * value + 0.1 if math.isfinite(value) else 0.5
    if isinstance(value, str):
        return {"sdpa": "eager", "eager": "sdpa"}.get(value, f"{value}_") if texts else value
    if isinstance(value, transformers.utils.ModelOutput):
        return type(value)(**{key: another(item, texts) for key, item in value.items()})
    if type(value) is dict:
        return {key: another(item, texts) for key, item in value.items()}
    items = (
        [another(item, texts) for item in value] if isinstance(value, (tuple, list, set)) else []
    )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    return type(value)(items) if type(value) in (list, tuple, set) else value


def changed(raw: Any) -> Any:
    """Return what stands in a class or module with its results scaled."""
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(changed(raw.__func__))
    if isinstance(raw, property):
        return property(changed(raw.fget))

    @functools.wraps(raw)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return another(raw(*args, **kwargs), texts=False)

    return replacement


def _functions(value: Any, depth: int = 6) -> Iterator[FunctionType]:
    """Yield a function and those that it wraps."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    if not isinstance(value, FunctionType) or not depth:
        return
    yield value
    for cell in value.__closure__ or ():
        try:
            yield from _functions(cell.cell_contents, depth - 1)
        except ValueError:  # the cell is empty
            continue
    yield from _functions(getattr(value, "__wrapped__", None), depth - 1)


def codes_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> set[CodeType]:
    """Return the code of Python that a call of the model runs."""
    codes = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        result = run(model, inputs)
    finally:
        sys.setprofile(None)
    if isinstance(result, Exception):
        raise result
    return codes


def _is_value(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, dict)):
        items = list(value.values()) if isinstance(value, dict) else list(value)
        return bool(items) and all(map(_is_value, items))
    return isinstance(value, (bool, int, float, str, torch.Tensor))


def changes(model: Any, inputs: dict[str, torch.Tensor]) -> list[Change]:
    """Return every change of what a call of the model reads."""
    codes = codes_of(model, inputs)
    files = [sys.modules[name] for name in dict.fromkeys([type(model).__module__, *SHARED])]
    own = [{code for code in codes if code.co_filename == file.__file__} for file in files]
    found = [
        change
        for file, of_file in zip(files, own, strict=True)
        if of_file
        for change in _changes_of_file(file, of_file, _names(of_file))
    ]
    found += _changes_of_instances(model, files[0], own[0], _names(own[0]))
    found += _changes_of_torch(model, files, codes)
    by_place: dict[str, Change] = {}
    for change in found:
        by_place.setdefault(change.place, change)
    return list(by_place.values())


def _names(codes: set[CodeType]) -> set[str]:
    """Return the names of globals and attributes that code reads, nested code included."""
    names: set[str] = set()
    for code in codes:
        names |= set(code.co_names)
        names |= _names({value for value in code.co_consts if isinstance(value, CodeType)})
    return names


def _changes_of_file(file: ModuleType, codes: set[CodeType], names: set[str]) -> Iterator[Change]:
    short = file.__name__.rpartition(".")[2]
    for name, value in list(vars(file).items()):
        if inspect.isclass(value) and value.__module__ == file.__name__:
            yield from _changes_of_class(value, codes, names)
        elif name not in names or name.startswith("__"):
            continue
        elif _is_value(value):
            yield _value(f"{short}.{name}", file, name)
        elif _is_function(value) and "masking_utils" not in (value.__module__ or ""):
            yield Change(f"{short}.{name}()", lambda _, f=file: f, name, _function)
            if value.__module__ == file.__name__:
                yield from _changes_of_defaults(f"{short}.{name}", value, codes)


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType) or inspect.isbuiltin(value)


def _function(owner: Any, raw: Any) -> Any:
    return changed(raw)


def _value(place: str, owner: Any, name: str) -> Change:
    return Change(place, lambda _: owner, name, lambda _, raw: another(raw))


def _changes_of_defaults(place: str, raw: Any, codes: set[CodeType]) -> Iterator[Change]:
    for function in dict.fromkeys(_functions(raw)):
        if function.__code__ not in codes:
            continue
        code, defaults = function.__code__, function.__defaults__ or ()
        first = code.co_argcount - len(defaults)
        for index, value in enumerate(defaults):
            if _is_value(value):

                def value_of(_: Any, known: Any, index: int = index) -> Any:
                    return (*known[:index], another(known[index]), *known[index + 1 :])

                name = code.co_varnames[first + index]
                yield Change(f"{place}({name}=)", lambda _, f=function: f, "__defaults__", value_of)


def _changes_of_class(cls: type, codes: set[CodeType], names: set[str]) -> Iterator[Change]:
    for name, raw in list(vars(cls).items()):
        if any(function.__code__ in codes for function in _functions(raw)):
            yield Change(f"{cls.__name__}.{name}()", lambda _: cls, name, _function)
            yield from _changes_of_defaults(f"{cls.__name__}.{name}", raw, codes)
        elif name in names and not name.startswith("__") and _is_value(raw):
            yield _value(f"{cls.__name__}.{name}", cls, name)


def _changes_of_instances(
    model: Any, file: ModuleType, codes: set[CodeType], names: set[str]
) -> Iterator[Change]:
    classes: set[type] = set()
    for path, module in model.named_modules():
        if type(module) in classes or type(module).__module__ != file.__name__:
            continue
        classes.add(type(module))

        def owner(model: nn.Module, path: str = path) -> nn.Module:
            return model.get_submodule(path)

        for cls in type(module).__mro__:
            for name, raw in list(vars(cls).items()) if cls.__module__ == file.__name__ else ():
                called = any(function.__code__ in codes for function in _functions(raw))
                if called and isinstance(raw, FunctionType):
                    yield Change(f"{path or 'model'}.{name}()", owner, name, _method)
        for name, value in vars(module).items():
            if name in names - {"training"} and not name.startswith("__") and _is_value(value):
                yield Change(f"{path or 'model'}.{name}", owner, name, lambda _, raw: another(raw))
    for name, value in vars(model.config).items():
        if name in names and _is_value(value):
            place = f"config.{name}"
            yield Change(place, lambda model: model.config, name, lambda _, raw: another(raw))


def _changes_of_torch(
    model: Any, files: list[ModuleType], codes: set[CodeType]
) -> Iterator[Change]:
    """Yield changes of torch's modules in a model, and of functions that code reads of torch."""
    functions: dict[str, tuple[ModuleType, str]] = {}
    for cls in sorted({type(module) for module in model.modules()}, key=lambda cls: cls.__name__):
        if cls.__module__.startswith("torch.nn.modules") and "forward" in vars(cls):
            yield Change(f"nn.{cls.__name__}.forward()", lambda _, c=cls: c, "forward", _function)
            functions |= _torch_functions(cls.forward.__code__, sys.modules[cls.__module__])
    for file in files:
        for code in codes:
            if code.co_filename == file.__file__:
                functions |= _torch_functions(code, file)
    for place, (owner, name) in sorted(functions.items()):
        yield Change(place, lambda _, owner=owner: owner, name, _function)


def _torch_functions(code: CodeType, file: ModuleType) -> dict[str, tuple[ModuleType, str]]:
    """Return module and name of the functions of torch that code reads, by their full names."""
    functions: dict[str, tuple[ModuleType, str]] = {}
    owner: Any = None
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "LOAD_GLOBAL":
            owner = vars(file).get(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(owner, ModuleType):
            value = vars(owner).get(name)
            of_torch = owner.__name__.partition(".")[0] == "torch"
            if of_torch and _is_function(value) and name.removesuffix("_like") not in PROCESS_WIDE:
                functions[f"{owner.__name__}.{name}()"] = owner, name
            owner = value
        else:
            owner = None
    return functions


def _method(owner: Any, raw: Any) -> Any:
    function = raw.__func__ if isinstance(raw, MethodType) else raw
    return MethodType(changed(function), owner)


def sweep(kind: ModelType, levels: tuple[str, ...] = LEVELS) -> tuple[list[Difference], int]:
    """Return which changes a patched model does not follow, and how many changes were tried.

    A level at which the patched model differs without any change is listed once and left out.
    """
    model, inputs = kind.model(), kind.inputs()
    places = changes(model, inputs)
    unchanged = run(model, inputs)
    patched = {}
    differences = []

    def same(result: Result, stock: Result, place: str, level: str, moment: str) -> bool:
        found = problem(result, stock)
        if found is not None:
            differences.append(Difference(place, level, moment, found))
        return found is None

    for level in levels:
        model_at_level = copy.deepcopy(model)
        fusedops.patch(model_at_level, level=level)
        if same(run(model_at_level, inputs), unchanged, "nothing changed", level, "after"):
            patched[level] = model_at_level
    for change in places:
        with change.made(model):
            stock = run(model, inputs)
        for level, after in patched.items():
            with change.made(after):
                same(run(after, inputs), stock, change.place, level, "after")
            before = copy.deepcopy(model)
            with change.made(before):
                try:
                    fusedops.patch(before, level=level)
                    result = run(before, inputs)
                except Exception as error:  # no class is too odd for patch
                    result = error
                same(result, stock, change.place, level, "before")
            same(run(before, inputs), unchanged, change.place, level, "undone")
    for level, after in patched.items():
        same(run(after, inputs), unchanged, "all changes undone", level, "after")
    return differences, len(places)


FIRST = ("causal llama", "causal gpt2", "causal gpt_oss", "masked bert")
AT_A_PUSH = (
    *("causal gemma2", "causal bloom", "causal mixtral", "masked distilbert", "seq2seq t5"),
    "image vit",
)
# In the slow tier.
OTHERS = (
    *("causal llama eager", "causal gemma", "causal gemma3_text", "causal mistral"),
    *("causal qwen2", "causal qwen3", "causal phi", "causal phi3", "causal gpt_neox"),
    *("causal opt", "causal gptj", "causal gpt_neo", "causal codegen", "causal falcon"),
    *("causal cohere", "causal cohere2", "causal olmo", "causal olmo2", "causal granite"),
    *("causal granitemoe", "causal smollm3", "causal starcoder2", "causal stablelm"),
    *("causal nemotron", "causal helium", "causal glm", "causal qwen2_moe"),
    *("causal qwen3_moe", "causal olmoe", "causal deepseek_v3", "causal mpt"),
    *("causal qwen3_next", "causal kimi_linear", "causal mamba2", "causal zamba2"),
    *("causal falcon_mamba", "causal lfm2"),
    *("causal persimmon", "causal xglm", "causal biogpt", "causal openai-gpt", "causal ctrl"),
    *("masked bert eager", "masked roberta", "masked electra", "masked albert"),
    *("masked deberta", "masked deberta-v2", "masked mpnet", "masked modernbert"),
    *("masked squeezebert", "masked rembert", "masked xlm", "masked esm", "masked layoutlm"),
    *("seq2seq bart", "seq2seq mbart", "seq2seq pegasus", "seq2seq m2m_100"),
    *("seq2seq marian", "seq2seq mt5", "seq2seq switch_transformers", "seq2seq umt5"),
    *("seq2seq blenderbot", "image beit", "image clip", "image siglip"),
    *("image dinov2", "image convnext", "image swin", "image swinv2", "image vit_msn"),
    *("image ijepa", "image segformer", "speech whisper"),
)
STAGES = {"depths": [1, 2], "num_heads": [2, 4]}
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "deepseek_v3": {"num_key_value_heads": 4},
    "qwen3_next": QWEN_DELTA | {"mlp_only_layers": [0, 1]},
    "kimi_linear": KIMI | {"q_lora_rank": None, "n_group": 1},
    "mamba2": MAMBA2,
    "zamba2": ZAMBA2,
    "lfm2": LFM2,
    "convnext": {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "segformer": {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "swin": {"image_size": 32, "window_size": 4, "embed_dim": 16} | STAGES,
    "swinv2": {"image_size": 32, "window_size": 4, "embed_dim": 16} | STAGES,
    "clip": {"vision_config": VISION},
    "siglip": {"vision_config": VISION},
    "esm": {"vocab_size": 97, "pad_token_id": 1, "mask_token_id": 2, "token_dropout": False},
}


def kind_of(name: str) -> ModelType:
    """Return the type of ``"<task> <name>"``, with its eager attention after a third word."""
    task, model, *implementation = name.split()
    options = dict(OPTIONS.get(model, {}))
    if implementation:
        options["attn_implementation"] = implementation[0]
    return ModelType(task, model, options)


@pytest.mark.parametrize(
    "name",
    [
        *FIRST,
        *(pytest.param(name, marks=pytest.mark.ci(every=3)) for name in AT_A_PUSH),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_change_is_followed(name: str) -> None:
    differences, tried = sweep(kind_of(name))
    assert tried > 20
    assert not differences, "\n".join(map(str, differences))
