"""Notice when a module that a program called is no longer what it was.

Training flag, plain attributes, children, hooks and the names of parameters and buffers are facts of the program.
Python numbers the versions of a dict: as long as no dict of any module has changed, nothing else is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._torch import dict_version
from ..errors import StateChangeError, UnsupportedError
from ..record.engine import Engine
from .places import is_plain

_TABLES = ("_parameters", "_buffers", "_modules")


def _hooks(module: nn.Module) -> list[Mapping[Any, Any]]:
    return [table for name, table in vars(module).items() if name.endswith("_hooks") and isinstance(table, Mapping)]


def _dicts(module: nn.Module) -> list[Mapping[Any, Any]]:
    return [vars(module), *(vars(module)[name] for name in _TABLES), *_hooks(module)]


def _copied(value: Any) -> Any:
    return type(value)(value) if isinstance(value, (list, dict, set)) else value


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """What a program may depend on. Parameters and buffers themselves are read at each call."""
    plain = {
        name: _copied(value) for name, value in vars(module).items() if not name.startswith("_") and is_plain(value)
    }
    children = tuple((name, id(child)) for name, child in module._modules.items())
    hooks = tuple(tuple(map(id, table.values())) for table in _hooks(module))
    state = tuple((name, tensor is None) for name, tensor in (*module._parameters.items(), *module._buffers.items()))
    return type(module), plain, children, hooks, state


class ModuleGuard:
    """Facts about the modules that a program called, and a fast way to see that they still hold."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._facts = [_facts(module) for module in self._modules]
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [(table, dict_version(table)) for module in self._modules for table in _dicts(module)]

    def holds(self) -> bool:
        """Whether every fact is as it was."""
        for table, version in self._versions:
            if dict_version(table) != version:
                return self._look_again()
        return True

    def _look_again(self) -> bool:
        if [_facts(module) for module in self._modules] != self._facts:
            return False
        self._note_versions()
        return True


class ModuleSnapshot:
    """The attributes of modules before a recording, to find and undo what the recording did to them."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._before = [
            (path, module, [(table, dict(table)) for table in _dicts(module)[:4]]) for path, module in modules
        ]
        self._containers = [
            (f"{path}.{name}", value, _copied(value))
            for path, module in modules
            for name, value in vars(module).items()
            if isinstance(value, (list, dict)) and not name.startswith("_")
        ]

    def restore(self) -> list[tuple[str, Any]]:
        """Put everything back; gives the paths and new values of what had changed."""
        changed: list[tuple[str, Any]] = []
        for path, _, tables in self._before:
            for table, before in tables:
                for name in table.keys() | before.keys():
                    if table.get(name, _ABSENT) is not before.get(name, _ABSENT) and not _same_plain(
                        table.get(name), before.get(name)
                    ):
                        changed.append((f"{path}.{name}" if path else name, table.get(name)))
                if any(
                    table.get(name, _ABSENT) is not before.get(name, _ABSENT) for name in table.keys() | before.keys()
                ):
                    table.clear()  # type: ignore[attr-defined]
                    table.update(before)  # type: ignore[attr-defined]
        return changed


_ABSENT = object()


def _same_plain(a: Any, b: Any) -> bool:
    return type(a) is type(b) and is_plain(a) and bool(a == b)


def refuse_changes(changed: Sequence[tuple[str, Any]], engine: Engine) -> None:
    """A compiled call would not repeat what the recording did to a module's attributes."""
    for path, value in changed:
        if isinstance(value, Tensor):
            raise UnsupportedError(
                f"the program assigns a tensor to the module attribute {path}, which cannot be compiled yet. Return "
                "the tensor instead, or compile with fallback='eager'."
            )
        raise StateChangeError(
            f"the program changes the module attribute {path}: a compiled call would not change it again. Keep such "
            "a count in a buffer, change it outside the module, or compile with fallback='eager'."
        )
