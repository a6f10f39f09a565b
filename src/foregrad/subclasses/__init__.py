"""Tensor subclasses that wrap other tensors: records about them, and helpers that take them apart.

Programs over such subclasses are compiled by the usual entry points; see docs/subclasses.md.
"""

from typing import Any

_PUBLIC = {
    "SubclassCreationMeta": "schemas",
    "SubclassMeta": "schemas",
    "SubclassTracingInfo": "schemas",
    "create_subclass_meta": "helpers",
    "get_types_for_subclass": "helpers",
    "requires_subclass_dispatch": "helpers",
    "unwrap_tensor_subclasses": "helpers",
    "wrap_tensor_subclasses": "helpers",
    "wrap_tensor_subclasses_maybe_joint": "helpers",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Public names, found when they are asked for: the records know those of programs, which come later."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
