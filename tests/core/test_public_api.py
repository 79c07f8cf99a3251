"""The public names of the packages that other projects import, with their signatures.

``public_api.txt`` is the record. A change of it is a decision: whoever removes or renames a name,
or an argument, breaks users, and notes it in ``CHANGELOG.md``. After an addition write the record
anew: ``python tests/core/test_public_api.py``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

RECORD = Path(__file__).with_name("public_api.txt")
PACKAGES = (
    *("fusedops", "fusedops.ops", "fusedops.nn", "fusedops.optim", "fusedops.checkpoint"),
    "fusedops.cpu",
    *("fusedops.generation", "fusedops.memory", "fusedops.models", "fusedops.parallel"),
    *("fusedops.planner", "fusedops.profiler", "fusedops.testing", "fusedops.train"),
    "fusedops.library",
)


def public_api() -> Iterator[str]:
    """Yield a line for each public name: callables with names, kinds and defaults of arguments."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.ismodule(value):
                yield f"{package}.{name}: module"
            elif not callable(value):
                yield f"{package}.{name}: {type(value).__name__}"
            else:
                yield f"{package}.{name}({_arguments(value)})"


def _arguments(function: object) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except ValueError:  # written in C
        return "..."
    shown = []
    for parameter in parameters:
        default = parameter.default
        text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        if default is not parameter.empty:
            text += f"={default!r}" if not callable(default) else f"={default.__name__}"
        keyword = parameter.kind is parameter.KEYWORD_ONLY
        shown.append(f"{'*, ' if keyword and '*, ' not in ''.join(shown) else ''}{text}")
    return ", ".join(shown)


def test_public_names_and_arguments_are_those_on_record() -> None:
    assert list(public_api()) == RECORD.read_text().splitlines()


if __name__ == "__main__":
    RECORD.write_text("\n".join(public_api()) + "\n")
