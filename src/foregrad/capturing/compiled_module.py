"""A compiled module that is the module: of its class, with its state, and with a forward that is compiled.

It is an object of its own, of a class that derives from the module's class, and both have one `__dict__`. So there is
nothing to forward or to keep in step: attributes, parameters, hooks and methods are found where Python and torch look
for them, from either side. torch calls a module's own hooks around its forward, and calls this one's as well; the
program that is compiled is the forward.
"""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .._torch import calls_modules_plainly, left_alone
from ..options import AOTConfig
from .compiled import Compiled, Recompile, Specialization
from .data_parallel import CompiledInside
from .forward import Forward, forward_in

_SLOT = "_foregrad_compiled"  # beside the dict, which is the original's too


class AOTModule(nn.Module):
    """What all compiled modules are, beside being of the class of their original.

    >>> import torch, foregrad
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> compiled = foregrad.aot_module(layers, lambda graph, inputs: foregrad.make_boxed_func(graph.forward))
    >>> isinstance(compiled, torch.nn.Sequential), len(compiled), list(compiled.state_dict())
    (True, 2, ['0.weight', '0.bias'])
    >>> compiled.eval()[0] is layers[0], layers.training
    (True, False)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing that the module's class wants to be done for its subclasses is done for a compiled one."""

    @property
    def orig_module(self) -> nn.Module:
        """The module that was compiled, with the same state."""
        compiled = _compiled_of(self)
        return _uncompiled(self) if compiled is None else compiled.original

    @property
    def specializations(self) -> list[Specialization]:
        """The programs compiled so far."""
        compiled = _compiled_of(self)
        return [] if compiled is None else compiled.specializations

    @property
    def recompiles(self) -> list[Recompile]:
        """Why each program but the first was compiled."""
        compiled = _compiled_of(self)
        return [] if compiled is None else compiled.recompiles

    def __getattr__(self, name: str) -> Any:
        if name == _SLOT:
            raise AttributeError(name)
        compiled = _compiled_of(self)
        if compiled is not None and type(compiled.original) is not _class_of(self):
            _set_class(self, type(compiled.original))  # which was given another class, as parametrizations do
            return getattr(self, name)
        return super().__getattr__(name)

    def __copy__(self) -> AOTModule:
        return made_of(copy.copy(self.orig_module), _config_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> AOTModule:
        memo[id(self)] = copied = _empty(_class_of(self))  # to which the original may lead
        _fill(copied, (copy.deepcopy(self.orig_module, memo), copy.deepcopy(_config_of(self), memo)))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = _class_of(self)
        given = (kind,) if _slots_of(kind) else ()  # others are given their class with their original, by its own ways
        return _empty, given, (self.orig_module, _config_of(self)), None, None, _fill


def made_of(module: nn.Module, config: AOTConfig | None) -> AOTModule:
    """A compiled module for a module."""
    made = _empty(type(module))
    _fill(made, (module, config))
    return made


def _empty(kind: type = nn.Module) -> AOTModule:
    made: AOTModule = object.__new__(_compiled_class(kind, patched=False))
    return made


def _fill(made: AOTModule, state: tuple[nn.Module, AOTConfig | None]) -> None:
    module, config = state
    object.__setattr__(made, "__dict__", vars(module))
    if config is not None:
        object.__setattr__(made, _SLOT, _compile(module, config))
    _set_class(made, type(module))


def _compile(module: nn.Module, config: AOTConfig) -> Compiled | CompiledInside:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        inside = made_of(module.module, config)
        return CompiledInside(module, getattr(inside, _SLOT), inside)
    return Compiled(Forward.of(module), module, config)


def _compiled_of(module: AOTModule) -> Compiled | CompiledInside | None:
    """What runs the forward; None for a module that code of the user's has made of a compiled one's class."""
    return getattr(module, _SLOT, None)


def _config_of(module: AOTModule) -> AOTConfig | None:
    compiled = _compiled_of(module)
    return None if compiled is None else compiled.config


def _uncompiled(module: AOTModule) -> nn.Module:
    """The same state as a module of the original class."""
    twin: nn.Module = object.__new__(_class_of(module))
    object.__setattr__(twin, "__dict__", vars(module))
    return twin


# ---------------------------------------------------------------------------------------------------------------------
# The classes of compiled modules: one for each class of modules, which lives as long as a module of it.
def _compiled_class(kind: type, patched: bool) -> Any:
    subclasses: list[type] = type.__subclasses__(kind)
    for known in subclasses:
        if vars(known).get(_ORIGINAL) is kind and vars(known)[_PATCHED] is patched:
            return known
    make: Any = abc.ABCMeta.__new__ if isinstance(kind, abc.ABCMeta) else type.__new__  # the user's code is not run
    members: dict[str, Any] = {
        "__slots__": (_SLOT,),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__class__": property(_class_of_original, _set_class),
        _ORIGINAL: kind,
        _PATCHED: patched,
    }
    if issubclass(kind, nn.parallel.DistributedDataParallel):
        members["module"] = property(lambda self: getattr(self, _SLOT).module)
    else:
        members |= _forward_members(kind, patched)
    if _BY_IDENTITY(kind) == _BY_IDENTITY(object):
        members |= {"__eq__": _is_the_same, "__hash__": _hash}
    members |= {name: _SlotOfOriginal(slot) for name, slot in _slots_of(kind).items()}
    return make(type(kind), kind.__name__, (AOTModule, kind), members)


_ORIGINAL, _PATCHED = "_foregrad_original", "_foregrad_patched"


def _forward_members(kind: type, patched: bool) -> dict[str, Any]:
    members: dict[str, Any] = {}
    if patched or forward_in(kind) is not forward_in(nn.Module):
        members["forward"] = _PatchedForward(_forward_of(kind)) if patched else _forward_of(kind)
    if operator.attrgetter("__call__")(kind) is _module_call:
        members["__call__"] = _call
    return members


_BY_IDENTITY = operator.attrgetter("__eq__", "__hash__")


def _slots_of(kind: type) -> dict[str, Any]:
    members = [member for base in reversed(kind.__mro__) for member in vars(base).items()]
    return {name: member for name, member in members if type(member) is types.MemberDescriptorType}


def _class_of(module: AOTModule) -> Any:
    """The class that the class of a compiled module was made for."""
    return getattr(type(module), _ORIGINAL)


def _class_of_original(module: AOTModule) -> type:
    return type(module.orig_module)


def _set_class(module: AOTModule, kind: type) -> None:
    """Give a module, and its original, another class; lazy modules and parametrizations do that."""
    compiled = _compiled_of(module)
    if compiled is not None and type(compiled.original) is not kind:
        compiled.original.__class__ = kind
    patched = compiled is not None and compiled.forward.patched is not None
    vars(object)["__class__"].__set__(module, _compiled_class(kind, patched))


def _identity(module: Any) -> Any:
    compiled = _compiled_of(module) if isinstance(module, AOTModule) else None
    return module if compiled is None else compiled.original


def _is_the_same(self: AOTModule, other: Any) -> Any:
    """A compiled module and its original are one module to whoever looks modules up, as hooks do."""
    return True if _identity(self) is _identity(other) else NotImplemented


def _hash(self: AOTModule) -> int:
    return object.__hash__(_identity(self))


_module_call: Any = nn.Module.__call__


@left_alone
def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module as torch does; one that has nothing to be called around its forward, in half the time."""
    if (
        self._forward_hooks
        or self._forward_pre_hooks
        or self._backward_hooks
        or self._backward_pre_hooks
        or not _INSTEAD.isdisjoint(self.__dict__)
        or not calls_modules_plainly()
    ):
        return nn.Module.__call__(self, *args, **kwargs)
    try:
        compiled = self._foregrad_compiled
    except AttributeError:
        return nn.Module.__call__(self, *args, **kwargs)
    return compiled(*args, **kwargs)


_call.__signature__ = inspect.signature(_module_call)  # type: ignore[attr-defined]
_INSTEAD = frozenset({"forward", "_compiled_call_impl"})  # what may be called in place of the class's forward


def _forward_of(kind: type) -> Callable[..., Any]:
    """A forward with the signature of the class's; code that takes wrappers off does not come to that one."""
    eager = forward_in(kind)

    @left_alone
    @functools.wraps(eager)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            compiled = self._foregrad_compiled
        except AttributeError:
            return eager(self, *args, **kwargs)
        return compiled(*args, **kwargs)

    del forward.__wrapped__
    if isinstance(eager, types.FunctionType):
        forward.__signature__ = inspect.signature(eager)  # type: ignore[attr-defined]
    return forward


class _PatchedForward:
    """The forward of a module that had one in its `__dict__` when it was compiled; one that is put there later is
    called as it is, as for any module."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self._forward
        now, compiled = vars(module).get("forward"), _compiled_of(module)
        if now is None or compiled is None or now is compiled.forward.patched:
            return types.MethodType(self._forward, module)
        return now

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["forward"] = value

    def __delete__(self, module: Any) -> None:
        if "forward" not in vars(module):
            raise AttributeError("forward")
        del vars(module)["forward"]


class _SlotOfOriginal:
    """A slot of the original's class: the value is in the original."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else self._slot.__get__(module.orig_module)

    def __set__(self, module: Any, value: Any) -> None:
        self._slot.__set__(module.orig_module, value)

    def __delete__(self, module: Any) -> None:
        self._slot.__delete__(module.orig_module)
