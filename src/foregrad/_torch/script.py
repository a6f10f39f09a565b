"""TorchScript: modules in C++, run with the tensors that stand for their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .autograd import running_watch
from .guards import Replaced, disable_modes, dispatch_mode_depth
from .operators import call_torchbind, is_script_object

StandIn = Callable[[torch.Tensor], torch.Tensor]

ScriptMethod = torch.ScriptMethod
ScriptModule = torch.ScriptModule  # what a module of TorchScript is in C++
ConcreteModuleType: Any = torch._C.ConcreteModuleType


def script_part(module: torch.nn.Module) -> Any:
    """What a module is in C++, if it is one of TorchScript's; its method is looked up, which it remembers."""
    if not isinstance(module, torch.jit.ScriptModule):
        return None
    getattr(module, "forward", None)
    return module._c


def script_attributes(module: Any) -> dict[str, Any]:
    """What a module of TorchScript holds beside parameters, buffers and modules; tensors in lists by their ids."""
    tables: Any = (torch._C.ParameterDict(module), torch._C.BufferDict(module))
    held = {name for table in tables for name, _ in table.items()}
    names = ConcreteModuleType.from_jit_type(module._type()).get_attributes()
    found = {name: module.getattr(name) for name in names if name not in held}
    return {name: v if isinstance(v, torch.Tensor) else _mapped(id, v) for name, v in found.items()}


def restore_script_attributes(module: Any, before: dict[str, Any]) -> None:
    """Assign again what a module of TorchScript held."""
    now = script_attributes(module)
    for name, value in before.items():
        if now[name] is not value and (isinstance(value, torch.Tensor) or now[name] != value):
            module.setattr(name, value)


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """What TorchScript holds, with other values in the places of tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    return type(value)([_mapped(change, item) for item in value]) if type(value) in (list, tuple) else value


def _holds_tensors(value: Any) -> bool:
    found: list[torch.Tensor] = []
    _mapped(found.append, value)
    return bool(found)


def run_on_stand_ins(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stand_in: StandIn) -> Any:
    """Call a function of TorchScript, or a method of a module, with other tensors in the places of those it holds.

    Its graph reads them in C++, where no mode sees it. They become arguments of a function that has the same graph.
    """
    owner = getattr(called, "owner", None)
    graph = _inlined(called)
    held = [_mapped(stand_in, value) for value in _lifted(graph, owner)]
    function = torch._C._create_function_from_graph(called.name, graph)
    module = () if owner is None else (owner,)
    return _call_script_function(function, *module, *_bound(called, args, kwargs), *held)


def _inlined(called: Any) -> Any:
    """A copy of the graph of a function or method, with those that it calls in it."""
    graph = called.graph.copy()
    torch._C._jit_pass_inline(graph)
    return graph


def changes_its_module(method: Any) -> str | None:
    """The name of something that a method of a module of TorchScript assigns, or calls without telling what it does."""
    kinds = ("prim::SetAttr", "prim::CallMethod")
    return next((str(node.s("name")) for node in _nodes(_inlined(method)) if node.kind() in kinds), None)


def _bound(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments in the order of the schema, behind the module itself."""
    is_method = isinstance(called, ScriptMethod)
    places = called.schema.arguments[is_method:]
    others = places[len(args) :]
    known = {*kwargs} <= {argument.name for argument in others} and len(args) <= len(places)
    if not known or any(a.name not in kwargs and not a.has_default_value() for a in others):
        call = _call_script_method if is_method else _call_script_function
        call(called, *args, **kwargs)  # raises before anything runs
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in others)]


def _nodes(block: Any) -> Iterator[Any]:
    for node in list(block.nodes()):
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _lifted(graph: Any, module: Any) -> list[Any]:
    """Make inputs of the tensors, and of lists of them, that a graph reads of its module, or holds; gives them."""
    self_name = "" if module is None else next(graph.inputs()).debugName()
    found = []
    for node in _nodes(graph):
        value = _held_by(node, self_name, module)
        if _holds_tensors(value):
            found.append(value)
            node.output().replaceAllUsesWith(graph.addInput().setType(node.output().type()))
    return found


def _held_by(node: Any, self_name: str, module: Any) -> Any:
    """What a node of a graph gives, if it is a tensor of the graph's or anything that the module holds."""
    if node.kind() == "prim::Constant" and node.hasAttribute("value") and node.kindOf("value") == "t":
        return node.t("value")
    path: list[str] = []
    while node.kind() == "prim::GetAttr":
        path.insert(0, node.s("name"))
        if node.input().debugName() == self_name:
            with disable_modes():
                for name in path:
                    module = getattr(module.getattr(name), "_c", module.getattr(name))  # of a module, the part in C++
            return module
        node = node.input().node()
    return None


_call_script_method = torch.ScriptMethod.__call__


def _call_or_record(method: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a script object, called as an operator where a mode listens."""
    if dispatch_mode_depth() and is_script_object(method.raw_owner):
        return call_torchbind(method.raw_owner, method.name, *args, **kwargs)
    watch = running_watch()
    if watch is not None and dispatch_mode_depth() and isinstance(method.owner, ScriptModule):
        return watch.call_script(method, args, kwargs)
    return _call_script_method(method, *args, **kwargs)


# Methods of script objects run in C++, where no mode sees them; patching the call is what torch itself does.
script_calls_seen = Replaced(torch.ScriptMethod, "__call__", _call_or_record)


_call_script_function = torch.jit.ScriptFunction.__call__


def _call_function_or_record(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of TorchScript; one that was traced may hold tensors."""
    watch = running_watch()
    if watch is None or not dispatch_mode_depth() or not _lifted(_inlined(function), None):
        return _call_script_function(function, *args, **kwargs)
    return watch.call_script(function, args, kwargs)


script_functions_seen = Replaced(torch.jit.ScriptFunction, "__call__", _call_function_or_record)
