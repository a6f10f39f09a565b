"""Programs that are graphs of a front end: run node by node, so that each operator tells the user's line."""

from __future__ import annotations

from typing import Any

import torch.fx.traceback as fx_traceback
from torch import fx
from torch.utils.checkpoint import checkpoint

from .._torch import checkpoint_contexts, checkpoint_operator, static_inputs, transforms_ended


def run_graph_program(graph: fx.GraphModule, *args: Any) -> Any:
    """Run a graph as the user wrote it.

    Dynamo puts an operator in the place of a checkpoint, and leaves it to the compiler that what is run again draws the
    same random numbers. Here it is a checkpoint again, which keeps the random state as in eager.
    """
    own = frozenset(id(arg) for arg, stays in zip(args, static_inputs(graph), strict=False) if stays)
    with fx_traceback.preserve_node_meta(), transforms_ended():
        return _Program(graph, own).run(*args)


class _Program(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, own: frozenset[int]) -> None:
        """A graph, or the body of an operator in it.

        Args:
            graph: to be run.
            own: parameters and buffers, by their ids: modules find them by themselves.
        """
        super().__init__(graph)
        self._own = own
        self.extra_traceback = False  # nodes tell the user's line

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(_plain, args)), _plain(kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is checkpoint_operator():
            return _checkpointed(self._own, *args, **kwargs)
        return super().call_function(target, args, kwargs)


def _plain(value: Any) -> Any:
    """Arguments as the user wrote them: graphs hold lists and dicts of their own kinds."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _checkpointed(own: frozenset[int], body: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """A checkpoint is given what the user has given to it: it refuses to run again what was written since.

    A buffer that its module has found may be written, as those of batch norm are: the body is given them all.
    """
    context_fn = checkpoint_contexts(body)
    if context_fn is not None:
        options["context_fn"] = context_fn
    options["use_reentrant"] = False  # the other kind gives the same gradients, and fewer of them

    found = {i: arg for i, arg in enumerate(args) if id(arg) in own}

    def run(*given: Any) -> Any:  # a bound method would keep what the interpreter has computed
        rest = iter(given)
        return _Program(body, own).run(*(found[i] if i in found else next(rest) for i in range(count)))

    count = len(args)
    return checkpoint(run, *(arg for i, arg in enumerate(args) if i not in found), **options)
