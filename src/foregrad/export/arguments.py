"""What stands at a place of an exported graph: plain data that names a node or holds a constant (G-4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorArgument:
    """A tensor, by the name of its node."""

    name: str


@dataclass(frozen=True)
class TokenArgument:
    """A token that orders side effects, by the name of its node."""

    name: str


@dataclass(frozen=True)
class SymIntArgument:
    """A symbolic integer, by the name of its node."""

    name: str


@dataclass(frozen=True)
class CustomObjArgument:
    """A script object, by the name of its node."""

    name: str
    class_fqn: str
    fake_val: Any = None


@dataclass(frozen=True)
class ConstantArgument:
    """A Python value that is part of the program."""

    name: str
    value: int | float | bool | str | None


ArgumentSpec = TensorArgument | SymIntArgument | ConstantArgument | CustomObjArgument | TokenArgument
