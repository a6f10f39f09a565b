"""Show that a refactoring changes nothing: everything that Foregrad makes of the oracle programs, as text.

python tests/golden.py build/before          # on the commit before
python tests/golden.py build/after           # on the commit after
diff -r build/before build/after
"""

from __future__ import annotations

import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

ROOT = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "src")]

import foregrad  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "min-cut": {"partition_fn": foregrad.min_cut_rematerialization_partition},
    "dynamic": {"dynamic": True},
    "no-grad": {},
}


def texts(make: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]], variant: str) -> Iterator[str]:
    """The generated call, the graphs and the metadata of one program."""
    fn, args, kwargs = make()
    compiled = foregrad.aot_function(fn, nop, **VARIANTS[variant])
    try:
        with torch.set_grad_enabled(variant != "no-grad"):
            results = compiled(*args, **kwargs)
        tensors = [
            leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if tensors and variant != "no-grad":
            torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
    for program in compiled.specializations:
        yield str(program)
        yield program.source
        for graph in (program.forward_graph, program.backward_graph, program.joint_graph):
            yield graph.code if graph is not None else "no graph"
        yield repr(program.metadata)


def nop(graph: Any, inputs: Any) -> Any:
    return foregrad.make_boxed_func(graph.forward)


def main(folder: pathlib.Path) -> None:
    from programs.test_oracle_programs import PROGRAMS

    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name, (fn, args, kwargs) in PROGRAMS.items():
        for variant in VARIANTS:
            torch.manual_seed(0)
            text = "\n\n".join(texts(lambda: (fn, args(), kwargs()), variant))
            text = re.sub(r"0x[0-9a-f]{6,}|(?<=== )\d{12,}", "0x...", text)
            text = re.sub(r'File ".*?/(src|tests)/([^"]*)", line \d+', r'File "\2"', text)
            (folder / f"{name}.{variant}.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
