"""Weights of Hugging Face's models, read and written: folders of safetensors, or a model itself.

Nothing is downloaded, and transformers is not needed: a folder has ``config.json`` and
``*.safetensors``, one file or several with an index. Tensors are read one row of the family's table
(``families.py``) at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops.models.config import TransformerConfig
from fusedops.models.huggingface.configs import config_values, from_config, to_config
from fusedops.models.huggingface.families import FAMILIES, Family, Row
from fusedops.models.initialize import local_indices, local_part
from fusedops.models.parallelization.engine import TrainEngine
from fusedops.models.parallelization.gathering import ParameterGatherer
from fusedops.models.transformer import Transformer

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = "model-?????-of-?????.safetensors"
# Names of one tensor where the head of BERT is tied.
_BERT_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")


def load_huggingface(
    source: str | os.PathLike[str] | nn.Module,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Transformer:
    """Return the ``Transformer`` that computes what a model of Hugging Face computes.

    Args:
        source: a folder with ``config.json`` and safetensors, or a model of transformers, patched
            or not: GPT-2, BERT (masked language model), Llama, Mistral, Qwen3, Qwen3-MoE, Mixtral,
            DeepSeek-V3.
        device: of the parameters; on ``"meta"`` they have no values, for ``parallelize`` with
            ``fill_huggingface``.
        dtype: of the parameters; ``None``: the checkpoint's.

    Returns:
        A model of its own: no memory is shared.

    Raises:
        ValueError: the folder has no configuration or no weights, a parameter is missing, has
            another shape, or has no place in the model; tied parameters differ; or the
            configuration asks for what ``Transformer`` does not compute.
        TypeError: ``source`` is neither.
        UnsupportedError: the package safetensors is missing.

    Example:
        >>> import tempfile
        >>> from fusedops.models import Transformer, load_huggingface, preset, save_huggingface
        >>> model = Transformer(preset("tiny-qwen3"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_huggingface(model, folder)
        ...     again = load_huggingface(folder)
        >>> again.config == model.config
        True
    """
    with ExitStack() as stack:
        ours, checkpoint = _opened(source, stack)
        if dtype is None:
            dtype = checkpoint.read(next(checkpoint.family.rows(ours)))[0].dtype
        model = Transformer(ours, device="meta", dtype=dtype)
        if device is None or torch.device(device).type != "meta":
            model.to_empty(device=torch.get_default_device() if device is None else device)
            _fill(model, ours, checkpoint)
    return model


def fill_huggingface(model: nn.Module, source: str | os.PathLike[str] | nn.Module) -> None:
    """Give the parameters of a ``Transformer`` the values of a model of Hugging Face.

    Of a model that is sharded over processes each reads the tensors of which it has a part, one
    after the other, and keeps that part: no process holds the whole model.

    Args:
        model: a ``Transformer``, sharded or not, or one stage of a pipeline, whose parameters have
            memory; buffers become 0.
        source: as in ``load_huggingface``.

    Raises:
        ValueError: as ``load_huggingface``, or the model has another configuration.
        TypeError: ``source`` is neither a folder nor a model.
        UnsupportedError: the package safetensors is missing.

    Example:
        ``parallelize(Transformer(config, device="meta"), ParallelConfig(zero=3), mesh,
        weights=functools.partial(fill_huggingface, source="llama-3-70b"))``
    """
    with ExitStack() as stack, torch.no_grad():
        ours, checkpoint = _opened(source, stack)
        config: Any = model.config
        for name in _SHAPING:
            value, own = getattr(ours, name), getattr(config, name)
            if own != value:
                checks.fail("fill_huggingface", "model", f"of {name} = {value}", own)
        if ours.balance_rate and not config.balance_rate:
            expected = "of balance_rate above 0, for the checkpoint has biases of routers"
            checks.fail("fill_huggingface", "model", expected, 0.0)
        _fill(model, ours, checkpoint)


# Parts of a configuration on which the parameters depend, but for their shapes, which are compared.
_SHAPING = ("num_layers", "tied", "num_experts")


def _opened(source: Any, stack: ExitStack) -> tuple[TransformerConfig, _Checkpoint]:
    """Return the configuration and the tensors of a source."""
    if isinstance(source, nn.Module):
        if not hasattr(source, "config"):
            checks.fail("load_huggingface", "source", "a model with a config", "one without")
        values, weights = config_values(source.config), source.state_dict()
        names, read = list(weights), weights.__getitem__
    else:
        if not isinstance(source, (str, os.PathLike)):
            checks.fail_type("load_huggingface", "source", "a folder or a model", source)
        folder = Path(source)
        if not folder.is_dir():
            expected = "a folder with config.json and safetensors (nothing is downloaded)"
            checks.fail("load_huggingface", "source", expected, repr(str(source)))
        values = config_values(folder / "config.json")
        names, read = open_folder(folder, stack)
    ours = from_config(values)
    checkpoint = _Checkpoint(names, read, FAMILIES[values["model_type"]])
    if ours.tied:
        checkpoint.check_tied()
    return ours, checkpoint


def save_huggingface(
    model: Transformer | TrainEngine,
    folder: str | os.PathLike[str],
    *,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write a model as transformers and other programs read it.

    Args:
        model: a ``Transformer``, or the engine of one that is sharded over processes: all of them
            call this, tensors are gathered one by one, and rank 0 writes.
        folder: where ``config.json`` and the weights go; made if it does not exist. Files of these
            names are replaced, each in one step when it is complete, and other files of weights of
            an earlier call are removed.
        max_file_bytes: above it the weights go into several files, with an index. One tensor is
            never divided.

    Raises:
        UnsupportedError: no family computes the same as this model (PanGu's query layer, ALiBi), or
            the package safetensors is missing.
        TypeError: ``model`` is neither a ``Transformer`` nor the engine of one.
        ValueError: ``max_file_bytes`` is not positive, or the model is one stage of a pipeline
            without its engine.
    """
    engine = model if isinstance(model, TrainEngine) else TrainEngine(model)
    model = engine.model
    if not isinstance(model, Transformer):
        checks.fail_type("save_huggingface", "model", "a Transformer or the engine of one", model)
    checks.integer("save_huggingface", "max_file_bytes", max_file_bytes, least=1)
    values = to_config(model.config)
    values["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    tensors = _their_tensors(engine, FAMILIES[values["model_type"]].rows(model.config))
    if _is_first():
        _write_files(Path(folder), _in_files(tensors, max_file_bytes), values)
    else:
        dict(tensors)  # sends its part


def _their_tensors(engine: TrainEngine, rows: Iterator[Row]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint on the process that writes; on others nothing."""
    parameters = ParameterGatherer(engine)
    for row in rows:
        tensors: list[Any] = [parameters.read(name) for name in row.ours]
        if _is_first():
            for name, tensor in zip(row.theirs, row.write(tensors), strict=True):
                yield name, tensor
                if row.twin is not None:
                    yield row.twin, tensor.clone()  # safetensors refuses shared memory


def _in_files(
    tensors: Iterator[tuple[str, torch.Tensor]], limit: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each file, none larger than ``limit`` bytes unless one tensor is."""
    file: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if file and sum(other.nbytes for other in file.values()) + tensor.nbytes > limit:
            yield file
            file = {}
        file[name] = tensor.contiguous()
    yield file


def _write_files(
    folder: Path, files: Iterator[dict[str, torch.Tensor]], values: dict[str, Any]
) -> None:
    """Write files under other names; when all are complete, give them theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    names_of_files, total = [], 0
    for index, file in enumerate(files):
        part = folder / f"{_WHOLE}.part{index}"
        _safetensors().torch.save_file(file, part, metadata={"format": "pt"})
        names_of_files.append(list(file))
        total += sum(tensor.nbytes for tensor in file.values())
    count = len(names_of_files)
    written = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    written = [_WHOLE] if count == 1 else written
    places: dict[str, str] = {}
    for index, (name, names) in enumerate(zip(written, names_of_files, strict=True)):
        os.replace(folder / f"{_WHOLE}.part{index}", folder / name)
        places |= dict.fromkeys(names, name)
    if count > 1:
        _write_json(folder, _INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        written.append(_INDEX)
    # An older checkpoint here may have had the other form or more files.
    for pattern in (_WHOLE, _INDEX, _SHARD, f"{_WHOLE}.part*"):
        for path in folder.glob(pattern):
            if path.name not in written:
                path.unlink()
    _write_json(folder, "config.json", values)


def _write_json(folder: Path, name: str, values: dict[str, Any]) -> None:
    part = folder / f"{name}.part"
    part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / name)


def open_folder(folder: Path, stack: ExitStack) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    """Return the names of a folder's tensors, and what reads one of them."""
    package = _safetensors()

    @cache
    def opened(file: str) -> Any:
        path = folder / file
        try:
            return stack.enter_context(package.safe_open(path, framework="pt"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
        except Exception as error:  # what the package raises for a damaged file is its own
            raise ValueError(f"{path} is no safetensors file: {error}") from None

    if (folder / _INDEX).exists():
        try:
            files = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{folder / _INDEX} is no index of weights") from None
    elif (folder / _WHOLE).exists():
        files = dict.fromkeys(opened(_WHOLE).keys(), _WHOLE)
    else:
        raise ValueError(
            f"load_huggingface: {folder} has neither {_WHOLE} nor {_INDEX}; convert other files "
            "first, with from_pretrained and save_pretrained of transformers"
        )

    def read(name: str) -> torch.Tensor:
        file = opened(files[name])
        try:
            return file.get_tensor(name)
        except Exception as error:  # as above: the index and the file do not agree, for example
            raise ValueError(f"cannot read {name} from {folder / files[name]}: {error}") from None

    return list(files), read


def _modern(name: str, prefix: str, head: str) -> str:
    """Return the name that older checkpoints have without base prefix, or with gamma and beta."""
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name if name == head else f"{prefix}{name}"


class _Checkpoint:
    """A checkpoint's tensors by the names of the family's table, however old it is."""

    def __init__(
        self, names: Iterable[str], read: Callable[[str], torch.Tensor], family: Family
    ) -> None:
        self._read, self.family = read, family
        prefix = "" if any(name.startswith(family.base) for name in names) else family.base
        self.names = {_modern(name, prefix, family.tied[1]): name for name in names}
        self.unread = set(self.names)

    def read(self, row: Row) -> list[torch.Tensor]:
        """Return the tensors of a row of our parameters."""
        names = self.names_of(row)
        tensors = [self._tensor(name) for name in names]
        return row.read(tensors) if names == row.theirs else tensors

    def names_of(self, row: Row) -> tuple[str, ...]:
        """Return the names of the tensors of a row, which count as read."""
        for name in (row.loaded, row.twin):
            if name is not None and name in self.names:
                self.unread.discard(name)
                return (name,)
        missing = [name for name in row.theirs if name not in self.names]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"load_huggingface: the checkpoint has no {missing[0]}{others}")
        self.unread.difference_update(row.theirs)
        return row.theirs

    def check_tied(self) -> None:
        """Raise where what should be one tensor is two unlike ones."""
        for names in (self.family.tied, _BERT_BIASES):
            if all(name in self.names for name in names):
                one, other = map(self._tensor, names)
                if not torch.equal(one, other.to(one)):
                    raise ValueError(
                        f"load_huggingface: {names[1]} must be {names[0]}, for the configuration "
                        "ties them, got another tensor: set its tie_word_embeddings to false, "
                        "which is how transformers computes with this checkpoint"
                    )

    def _tensor(self, name: str) -> torch.Tensor:
        self.unread.discard(name)
        return self._read(self.names[name])


def _fill(model: nn.Module, config: TransformerConfig, checkpoint: _Checkpoint) -> None:
    """Copy the parts of parameters that are here, and look at all names of the checkpoint."""
    family, buffers = checkpoint.family, dict(model.named_buffers())
    parameters: dict[str, Any] = dict(model.named_parameters()) | buffers
    with torch.no_grad():
        for buffer in buffers.values():
            buffer.zero_()
    for row in family.rows(config):
        if not any(name in parameters for name in row.ours):  # of another stage
            checkpoint.names_of(row)
            continue
        for name, tensor in zip(row.ours, checkpoint.read(row), strict=True):
            parameter = parameters.pop(name)
            if parameter.shape != tensor.shape:
                expected = f"{list(parameter.shape)} for {name}"
                checks.fail("load_huggingface", row.theirs[0], expected, list(tensor.shape))
            for dim, places in enumerate(local_indices(parameter)):
                if len(places) < tensor.shape[dim]:
                    tensor = tensor.index_select(dim, places.to(tensor.device))
            with torch.no_grad():
                local_part(parameter).copy_(tensor)
    missing = sorted(parameters.keys() - buffers.keys())
    assert not missing, f"no row of the family's table for {missing}"
    unused = (*family.unused, *family.tied[1:]) if config.tied else family.unused
    extra = f"{family.layers}{config.num_layers}." if family.has_extra_layer else "\n"
    left = [name for name in checkpoint.unread if not name.endswith(unused) and extra not in name]
    if left:
        others = f" and {len(left) - 1} more" if len(left) > 1 else ""
        expected = "a checkpoint of this model alone"
        checks.fail("load_huggingface", "source", expected, f"also {min(left)}{others}")


def _is_first() -> bool:
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise checks.UnsupportedError(
            "weights of Hugging Face need the package safetensors: pip install safetensors"
        ) from None
    return safetensors
