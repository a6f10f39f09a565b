"""What a recording did to the user's Python objects: find it, undo it, and refuse what a compiled call cannot repeat.

A recorded tensor must not stay where the user would meet it, and an attribute that the program changes would not be
changed again by a compiled call. Modules, objects, containers, closures and globals around the program are noted
before it runs and compared afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .._torch import dict_version
from ..errors import AssignedAttributeError, EscapeError, StateChangeError, UnsupportedError
from ..joint.effects import Escape
from ..record.lines import where
from ..record.recording import Recording
from .kinds import DICT, LIST, OBJECT
from .noted import Noted, NotedCell, NotedGlobal, NotedList, NotedTable
from .places import Place, Surroundings

_DEPTH = 3

# A dict: its version and its items before, in what it lies, its name there, and what that is.
_Table = tuple[dict[Any, Any], int, dict[Any, Any], str, str, str]


class Snapshot:
    """The user's objects around a program, before it is recorded."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._tables: list[_Table] = []
        self._noted: list[Noted] = []
        self._modules = list(surroundings.modules.values())
        for parts in self._modules:
            path = parts.path
            self._tables += [(table, v, dict(table), path, name, "module") for name, table, v in parts.filled]
            for name, container in parts.containers:
                self._note(path, name, "module", container)
        for holder in surroundings.holders:
            if holder.kind is OBJECT:
                self._note(holder.path, "", "object", getattr(holder.owner, "__dict__", None))
            elif holder.kind in (LIST, DICT):
                self._note(holder.path, "", "container", holder.owner)
        self._noted += [NotedCell(path, cell) for path, cell in surroundings.cells]
        self._noted += [NotedGlobal(*place) for place in surroundings.stored_globals]

    def _note(self, path: str, name: str, kind: str, container: Any) -> None:
        if isinstance(container, dict):
            self._tables.append((container, dict_version(container), dict(container), path, name, kind))
        elif isinstance(container, list):
            self._noted.append(NotedList(path, name, kind, container))

    def _perhaps_changed(self) -> list[Noted]:
        """Everything but the dicts whose version says that they are as they were."""
        changed: list[Noted] = [
            NotedTable(path, name, kind, table, before)
            for table, version, before, path, name, kind in self._tables
            if dict_version(table) != version
        ]
        for parts in self._modules:
            if any(parts.empty):
                filled = [table for table in parts.empty if table]
                changed += [NotedTable(parts.path, parts.name_of(table), "module", table, {}) for table in filled]
        return changed + self._noted

    # ------------------------------------------------------------------------------------------- looking
    def assigned(self, recording: Recording) -> list[Escape]:
        """Tensors that the program assigned to modules, which a compiled call assigns as well."""
        return [
            Escape(table, key, f"{noted.path}.{key}".strip("."), value)
            for noted in self._perhaps_changed()
            if (table := noted.assignable) is not None
            for key, value in noted.changes().items()
            if _is_assignable(value, noted.before.get(key), recording)
        ]

    def undo(self, recording: Recording) -> Exception | None:
        """Put back what the recording changed; gives the error for what a compiled call would not repeat."""
        error: Exception | None = None
        for noted in self._perhaps_changed():
            changed = noted.changes()
            if not changed:
                continue
            escaped = find_abstract(changed, recording, _DEPTH)
            if escaped is not None or noted.kind in ("module", "variable"):
                noted.restore()
                lost = [
                    k
                    for k, v in changed.items()
                    if noted.assignable is None or not _is_assignable(v, noted.before.get(k), recording)
                ]
                if lost:
                    error = error or self._refusal(noted, lost[0], escaped, recording)
        return error

    def _refusal(self, noted: Noted, key: Any, escaped: Tensor | None, recording: Recording) -> Exception:
        name = f"{noted.path}.{key}".strip(".") if noted.kind in ("module", "object") else noted.path
        if escaped is None:
            return StateChangeError(
                f"the program changes {name}: a compiled call would not change it again. Keep such a count in a "
                "buffer, change it outside the program, or compile with fallback='eager'."
            )
        if noted.kind == "module":
            return UnsupportedError(
                f"the program puts a tensor into {name}, in a way that cannot be compiled yet. Assign the tensor "
                "itself to an attribute, return it instead, or compile with fallback='eager'."
            )
        return EscapeError(
            f"A tensor of the program escapes into {name}; it was made at {_origin(escaped, recording)}. While the "
            "program is recorded its tensors have no data: return the tensor instead, or compile with fallback='eager'."
        )


def refuse_assigned_attributes(escapes: Sequence[Escape], buffers: Iterable[Place], inside: Sequence[str]) -> None:
    """An exported graph returns the new values of buffers; a tensor in any other attribute would be lost (X-12).

    `inside` are places in containers.
    """
    known = {(id(place.owner), place.key) for place in buffers}
    others = [e for e in escapes if e.tensor is None or (id(e.table), e.key) not in known]
    lost = [f"self.{path.removeprefix('_export_root.')}" for path in (*(e.path for e in others), *inside)]
    if lost:
        one = len(lost) == 1
        raise AssignedAttributeError(
            f"The tensor attribute{'' if one else 's'} {', '.join(lost)} {'was' if one else 'were'} assigned during "
            f"export: the graph would lose {'it' if one else 'them'}. Register {'it' if one else 'them'} with "
            "register_buffer, or return the value."
        )


def _is_assignable(value: Any, before: Any, recording: Recording) -> bool:
    """Whether a compiled call can assign a value as well: a tensor, or nothing in the place of one.

    A parameter that the program made is left out: it would be another module from then on.
    """
    if value is None:
        return isinstance(before, Tensor)
    made = isinstance(value, nn.Parameter) and recording.engine.is_abstract(value)
    return isinstance(value, Tensor) and not made


def find_abstract(value: Any, recording: Recording, depth: int) -> Tensor | None:
    """The first recorded tensor in a nest of containers."""
    if isinstance(value, Tensor):
        return value if recording.engine.is_abstract(value) else None
    if depth and isinstance(value, (list, tuple, dict, set)):
        for item in value.values() if isinstance(value, dict) else value:
            found = find_abstract(item, recording, depth - 1)
            if found is not None:
                return found
    return None


def _origin(tensor: Tensor, recording: Recording) -> str:
    """Where a recorded tensor comes from, in the user's words."""
    for recorded in recording.inputs:
        if recorded.seen is tensor:
            return str(recorded.slot)
    for step in recording.steps:
        if step.out is tensor or (isinstance(step.out, (list, tuple)) and any(item is tensor for item in step.out)):
            return where(step.stack)
    return "an unknown line"
