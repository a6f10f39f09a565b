"""Errors of autograd's about what a compiled program has saved, in autograd's words and with the program's name.

A program is one function to autograd, and saves what its backward reads for all of its results at once. Eager frees and
checks node by node: it may have kept what is gone here, and may not look at what was written. Nobody can tell when a
backward is refused, so the error is always Foregrad's own, of the class that eager would raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .._torch import backward_id, frees_when_run, is_version_error, will_run
from ..errors import BackwardError, ForegradError

SECOND_TIME = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access saved "
    "tensors after calling backward."
)


def is_second_time(error: BaseException) -> bool:
    """Whether autograd refuses because something that it saved was freed."""
    return "backward through the graph a second time" in str(error)


def named(error: RuntimeError, program: str) -> RuntimeError:
    """An error of autograd's about saved tensors, as the program's own; any other as it is."""
    if isinstance(error, BackwardError):
        return error
    if is_second_time(error):
        return backward_again(program, str(error))
    if is_version_error(error):
        return BackwardError(
            f"{error} The backward of {program}, which is compiled, checks all tensors that it saved, also those that "
            "eager would not save, or not read for these gradients. Run the backward before you write, write to a "
            "copy, or call the original function."
        )
    return error


def perhaps_elsewhere(error: Exception, program: str) -> Exception:
    """What autograd said of a whole backward, where only some gradients are asked for."""
    if not isinstance(error, RuntimeError) or isinstance(error, ForegradError):
        return error
    return BackwardError(
        f"{error} {program} is compiled, and its backward runs as a whole: eager may not get there on its way to the "
        "gradients that were asked for. Call the original function."
    )


def backward_again(program: str, words: str = SECOND_TIME) -> BackwardError:
    """What is said where something is freed that a backward needs."""
    return BackwardError(
        f"{words} {program} is compiled, and one function to autograd: a backward through some of its results frees "
        "also what leads to arguments that only others depend on. Pass retain_graph=True to the first backward, "
        "differentiate the results together, or detach what needs no gradient."
    )


def refuse_later(nodes: Iterable[Any], program: str) -> None:
    """Nodes before a program, and those before them, run now without a gradient, and free what they saved.

    Eager would not get there. A later backward that does is refused by name, before it meets what is gone.
    """
    refuse = _refusing_after(backward_id(), program)
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node is None or hasattr(node, "variable") or node in seen or not will_run(node):
            continue  # a leaf saves nothing
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        if not _is_compiled(node) and frees_when_run(node):
            node.register_prehook(refuse)


def _refusing_after(now: int, program: str) -> Callable[[Any], None]:
    def refuse(gradients: Any) -> None:
        if backward_id() != now:
            raise backward_again(program)

    return refuse


def _is_compiled(node: Any) -> bool:
    """Whether a node is that of a compiled program, which names its own errors."""
    return hasattr(node, "stash")


def under_hooks(error: Exception) -> BackwardError:
    """What is said in the place of an error about versions that eager does not raise."""
    return BackwardError(
        f"{error} Eager does not look, for saved-tensor hooks were active in the forward, and computes with what the "
        "hooks give back: this cannot be compiled. Call it without the hooks, or call the original function."
    )
