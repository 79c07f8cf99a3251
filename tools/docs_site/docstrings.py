"""Griffe's extension: reads this package as Python does, and its docstrings as they are meant.

* A function that a package exports often has the name of the file that defines it
  (``fusedops.ops.layer_norm``). For griffe the file hides the function, for Python the reverse.
* The section ``Example:`` has the prompts of a doctest, which the parser knows as ``Examples:``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Change objects while they are loaded."""

    def on_instance(self, *, obj: griffe.Object, **options: Any) -> None:
        """Rename the section of examples."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **options: Any) -> None:
        """Let an exported function stand for the file of its name."""
        defined = list(_exported_functions(pkg))
        for (package, name), function in defined:
            package.members[name] = griffe.Alias(name, function, parent=package)


def _exported_functions(package: griffe.Module) -> Any:
    for name in map(str, package.exports or ()):
        member = package.members.get(name)
        try:
            module = member.final_target if member is not None and member.is_alias else member
        except griffe.AliasResolutionError:  # of another project
            continue
        if module is None or not module.is_module:
            continue
        function = module.members.get(name)
        own_file = module.path == f"{package.path}.{name}"
        imported = not own_file or package.imports.get(name) == f"{module.path}.{name}"
        if function is not None and imported:
            function = function.final_target if function.is_alias else function
            yield (package, name), function
    for member in package.members.values():
        if not member.is_alias and member.is_module:
            yield from _exported_functions(member)
