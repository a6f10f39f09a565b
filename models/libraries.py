"""The libraries of the table, and what each needs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from . import torchvision_shim
from .case import Case

# The module here and its function that gives the models, and what must be installed for it.
LIBRARIES: dict[str, tuple[str, str, Sequence[str]]] = {
    "transformers": ("hugging_face", "cases", ("transformers",)),
    "torchvision": ("vision", "torchvision_cases", ("torchvision",)),
    "timm": ("vision", "timm_cases", ("timm", "torchvision")),
    "diffusers": ("others", "diffusers_cases", ("diffusers",)),
    "peft": ("others", "peft_cases", ("peft", "transformers")),
    "nn": ("usual", "cases", ()),
    "pyg": ("others", "pyg_cases", ("torch_geometric",)),
}


def missing(library: str) -> str:
    """What a library of the table needs and is not installed."""
    _, _, needed = LIBRARIES[library]
    return ", ".join(name for name in needed if importlib.util.find_spec(name) is None)


def cases_of(library: str) -> list[Case]:
    """The models of one library."""
    torchvision_shim.install()  # others import it too, where it is installed
    module, function, _ = LIBRARIES[library]
    return list(getattr(importlib.import_module(f"models.{module}"), function)())
