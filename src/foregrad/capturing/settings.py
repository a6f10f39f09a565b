"""Settings of the process that a program may change and read: Python's, numpy's, torch's.

They lie in C, or in modules that the walk does not look into, and are reached by calling functions. A program counts as
using one if the name of such a function stands in its code.
"""

from __future__ import annotations

import decimal
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

from .._torch import SETTINGS_BY_CALLS, SettingProperty
from .code import is_library_module
from .kinds import Items, Kind


class Setting(NamedTuple):
    """Something that holds for the whole process, and that functions set and read."""

    setters: frozenset[str]  # names of functions
    getters: frozenset[str]
    read: Callable[[], Items]
    write: Callable[[Items], object]


SETTING = Kind(
    "setting",
    lambda owner: owner.read(),
    lambda owner, items: owner.write(items) and None,
    is_attribute=True,
    compared="not at all",
)


def _setting(name: str, setters: str, getters: str, read: Callable[[], Any], write: Callable[[Any], object]) -> Setting:
    """A setting with one value."""
    names = frozenset(setters.split()), frozenset(getters.split())
    return Setting(*names, lambda: {name: read()}, lambda items: write(items[name]))


def _decimal_context() -> dict[str, Any]:
    context = decimal.getcontext()
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    traps = [signal.__name__ for signal, on in context.traps.items() if on]
    return {**{name: getattr(context, name) for name in names}, "traps": traps}


def _set_decimal_context(items: dict[str, Any]) -> None:
    traps = [signal for signal in decimal.getcontext().traps if signal.__name__ in items["traps"]]
    decimal.setcontext(decimal.Context(**{**items, "traps": traps}))


def _set_filters(items: Items) -> None:
    warnings.filters[:] = items.values()  # type: ignore[index]
    with warnings.catch_warnings():  # which tells Python that they have changed
        pass


_PYTHONS = (
    _setting(
        "the limit of recursion", "setrecursionlimit", "getrecursionlimit", sys.getrecursionlimit, sys.setrecursionlimit
    ),
    _setting("the working directory", "chdir", "getcwd cwd", os.getcwd, os.chdir),
    _setting("the context of decimals", "getcontext setcontext", "getcontext", _decimal_context, _set_decimal_context),
    Setting(
        frozenset({"simplefilter", "filterwarnings", "resetwarnings"}),
        frozenset(),
        lambda: {f"the filters of warnings, {i}": one for i, one in enumerate(warnings.filters)},
        _set_filters,
    ),
)


def _numpys() -> Iterator[Setting]:
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield _setting("numpy.geterr()", "seterr", "geterr", numpy.geterr, lambda kept: numpy.seterr(**kept))
        options = numpy.get_printoptions
        write = numpy.set_printoptions
        yield _setting(
            "numpy.get_printoptions()", "set_printoptions", "get_printoptions", options, lambda o: write(**o)
        )


def _all() -> list[Setting]:
    torchs = (_setting(f"torch's {name}", *names, *calls) for name, names, calls in SETTINGS_BY_CALLS)
    return [*_PYTHONS, *_numpys(), *torchs]


def settings_that_are_set(names: Set[str]) -> list[Setting]:
    """Settings that code with these names may change."""
    return [one for one in _all() if not one.setters.isdisjoint(names)]


def settings_that_are_read(names: Set[str]) -> list[Setting]:
    """Settings that code with these names may read."""
    return [one for one in _all() if not one.getters.isdisjoint(names)]


def properties_named(names: Set[str], namespaces: Iterable[types.ModuleType]) -> Iterator[Setting]:
    """Settings of torch's that are properties of modules, by these names."""
    for module in namespaces:
        if type(module) is not types.ModuleType and is_library_module(module):
            members = {name: member for base in type(module).__mro__ for name, member in vars(base).items()}
            for name in sorted(names & members.keys()):
                if isinstance(members[name], SettingProperty):
                    yield _property(module, name)


def _property(module: types.ModuleType, name: str) -> Setting:
    full = f"{module.__name__}.{name}"
    return _setting(full, "", "", lambda: getattr(module, name), lambda value: setattr(module, name, value))
