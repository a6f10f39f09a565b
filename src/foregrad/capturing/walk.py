"""What a program can reach by itself: closures, globals, defaults, modules, attributes.

One walk goes over everything, whatever its kind (see `kinds`). A tensor that is found is a free tensor: it is an input,
read from its source at each call (see `sources`). Everything else is compared at each call (see `state_guards`).
Arguments are walked as well, for the functions that are reached through them; what they hold is compared with the
call's own arguments (see `patterns`).
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import enum
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVarTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import (
    cached_parametrizations,
    global_module_hooks,
    global_optimizer_hooks,
    referrers_of,
    registered_with_pytree,
    script_part,
    without_function_modes,
)
from ..errors import UnsupportedError
from ..values import PLAIN, SETTLED, are_settled, is_plain, weakly
from . import kinds
from .code import (
    ANY_MODULE,
    READ_NAMESPACE,
    CodeThatRan,
    Names,
    ReadByName,
    Scope,
    found_where_it_says,
    is_library_class,
    is_library_file,
    is_library_function,
    is_library_module,
    methods_of,
    names_in,
)
from .forward import Forward
from .free_variables import FreeVariables, Holder, Reached, Unfollowed, looked_at, refuse_unknown
from .kinds import (
    Kind,
    attributes_of,
    class_dict,
    has_slots,
    is_a,
    is_users_wrapper,
    kinds_of,
    own_attributes,
    remembers_tensors,
    size_of,
)
from .module_guards import ModuleParts
from .patterns import ObjectPattern
from .schedules import Schedules
from .settings import SETTING, properties_named, settings_that_are_set
from .sources import Source
from .state_guards import ABSENT, StateGuard

Ts = TypeVarTuple("Ts")

_MOST_HOLDERS = 20_000  # that are walked before the code that runs has to tell what is read
_MOST_BYTES = 1 << 20  # of an array of numbers that is compared at each call


class Walk(FreeVariables):
    """Goes over everything that a function can reach, as far as its scope goes."""

    refusal: UnsupportedError | None = None  # what a program that runs was told, and may have caught

    def __init__(
        self,
        root: Callable[..., Any],
        arguments: Sequence[tuple[str, Any]] = (),
        scope: Scope | None = None,
        classes: Sequence[type | types.FunctionType | types.MethodType] = (),
        schedules: Schedules | None = None,
    ) -> None:
        """Walk from a function, from the leaves of its arguments, and from the classes of objects in those; functions
        among them are called beside. Nobody looks into schedules that calls step."""
        super().__init__()
        self._schedules = schedules
        self._root, self._arguments, self._classes = root, arguments, classes
        self._scope = scope or Scope()
        self._hidden_state: list[Unfollowed] = []  # what a recording may change, and nothing can see or put back
        self._computes_names = False
        self._seen_classes: set[tuple[int, bool]] = set()
        self._seen_globals: dict[int, set[str]] = {}  # by the id of a namespace
        self._names: set[str] = {"forward"}  # that the program may look up in an object
        self._named_by_getters: set[str] = set()
        self._assigned: set[str] = set()  # attributes that the program may assign
        self._noted: set[tuple[int, str]] = set()  # attributes of Python modules that are not the user's
        self._unnamed: dict[str, list[Any]] = {}  # members of classes that no function has named yet
        self._later: list[Callable[[], None]] = []  # what is far from the program: once names are known not to tell all
        self._functions: list[types.FunctionType] = []  # still to be looked at
        self._namespaces: list[tuple[types.ModuleType, str, set[str]]] = []  # with the names looked up so far
        self._in_argument = False
        self._private: set[int] = set()  # ids of functions that are reached through arguments only
        self.generators: list[torch.Generator] = []
        self.kernels: list[types.FunctionType | types.MethodType] = []  # of operators, which torch calls by itself
        self._told: dict[str, int] = {}  # how many of each were told of
        self._tell: Callable[[Reached], None] = lambda reached: None
        with looked_at():
            self._walk(root, arguments)
        self._new()

    @property
    def needs_code_that_runs(self) -> bool:
        """Whether names in code tell too little, so that what runs has to be noted."""
        return not self._scope.knows_code and (self._computes_names or bool(self.unknown))

    @property
    def code_that_ran(self) -> CodeThatRan | None:
        """Which code ran in a recording, where names in code tell too little."""
        return None

    def tell(self, note: Callable[[Reached], None]) -> None:
        """Tell of whatever else comes to be reached while the program runs."""
        self._tell = note

    def kernel_runs(self, frame: types.FrameType) -> None:
        """A function that torch calls by itself, for an operator, is about to run; it is looked at before."""
        code = frame.f_code
        if is_library_file(code.co_filename) or any(kernel.__code__ is code for kernel in self.kernels):
            return
        found: list[Any] = [one for one in referrers_of([code]) if is_a(one, types.FunctionType)]
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        methods = [types.MethodType(one, owner) for one in found if _is_method(one, type(owner))]
        with looked_at(), without_function_modes():
            self.kernels += methods or found
            for kernel in methods or found:
                self._enter_kernel(kernel)
            self._look_at_functions()
        if self._is_of_no_use:
            self.unknown.append(Unfollowed(code.co_name, "is a kernel of an operator and looks up names"))
        self._tell_new()

    def _enter_kernel(self, kernel: types.FunctionType | types.MethodType) -> None:
        self._visit(Source(kernel, "held", None, kernel.__name__), kernel)

    def _tell_new(self) -> None:
        if self._used_up:
            self._refuse_what_is_used_up()
        self._tell(self._new())

    def _new(self) -> Reached:
        """What was found since the last time."""
        reached, told = self.reached._asdict(), self._told
        self._told = {name: len(found) for name, found in reached.items()}
        return Reached(**{name: found[told.get(name, 0) :] for name, found in reached.items()})

    @property
    def _used_up(self) -> list[Unfollowed]:
        """Iterators, queues and the like."""
        return [found for found in self._hidden_state if found.is_used_up]

    def _refuse_what_is_used_up(self) -> None:
        try:
            refuse_unknown(self._used_up)
        except UnsupportedError as error:
            self.refusal = error
            raise

    def noting_code(self) -> contextlib.AbstractContextManager[None]:
        """Notes which code runs, where that has to be known."""
        return contextlib.nullcontext()

    def recording_ends(self) -> None:
        """The program will not run again."""

    def changed_for_good(self) -> list[Unfollowed]:
        """What a recording may change and nothing can put back, as far as the names in the program lead there."""
        if not self._hidden_state or not self._scope.needs_names:
            return self._hidden_state
        if self._is_of_no_use:
            return []
        named = ReadByName(Names(attributes=frozenset(self._names)))
        return Walk(self._root, self._arguments, named, self._classes)._hidden_state

    def source_of(self, tensor: Tensor) -> Source:
        """Where a tensor was found; one that is nowhere to be found is held as it is."""
        found = self.sources.of(tensor)
        if not found:  # a method was called by a name that stands nowhere
            for member in itertools.chain.from_iterable(self._unnamed.values()):
                self._enter_function(member)
            self._unnamed.clear()
            self._look_at_functions()
            found = self.sources.of(tensor)
        return found[0] if found else Source(tensor, "held", None, f"a tensor of shape {tuple(tensor.shape)}")

    def release(self) -> None:
        """Let go of everything that only a recording needs; no argument stays alive."""
        super().release()
        self._root, self._arguments, self._classes, self._schedules = len, (), (), None
        self._tell = lambda reached: None
        for held in (self._unnamed, self._later, self._functions, self._namespaces, self.generators, self.kernels):
            held.clear()

    def _walk(self, root: Callable[..., Any], arguments: Sequence[tuple[str, Any]]) -> None:
        self._guard(StateGuard.add_library, class_dict(Tensor))
        if isinstance(root, Forward):
            self._enter_module(root.module, "", root.calls_itself)
        elif isinstance(root, nn.Module):
            self._enter_module(root, "")
        else:
            self._visit(Source(root, "held", None, ""), root)
        self._look_at_functions()
        self._enter_hooks("all modules", global_module_hooks())  # the program may make a module and call it
        self._enter_hooks("all optimizers", global_optimizer_hooks())
        self._look_at_functions()
        if self._is_of_no_use:
            return
        known = frozenset(self._seen)
        self._in_argument = True
        for i, (path, value) in enumerate(arguments):
            if is_a(value, Tensor):
                self._enter_tensor(value, path)
            looked_into = own_attributes(value) if is_a(value, Tensor) else value
            if looked_into is not None and not is_plain(value):
                pattern = self.patterns[i] = ObjectPattern(looked_into, known)
                why = [f"is or holds a {kind.__name__}" for kind in pattern.unknown]
                self.unknown_arguments += [Unfollowed(path, reason) for reason in why]
                for j, tensor in enumerate(pattern.tensors):
                    self.sources.add(tensor, Source(i, "argument", j, path))
                self._visit(Source(value, "held", None, path), looked_into)
            elif looked_into is not None:
                self._note_containers(path, value)
        self._in_argument = False
        for kind in self._classes:
            if isinstance(kind, type):
                self._enter_class(kind)
            else:
                self._enter_kernel(kind)
        self._look_at_functions()
        self._guard_hooks_of_all()
        if "__subclasses__" in self._names:
            self._enter_subclasses()
        self._look_at_settings()

    def _look_at_settings(self) -> None:
        """What holds for the whole process, as far as names in the program lead there."""
        if id(os.environ) in self._seen:
            self._guard(StateGuard.add_variables, self._names)
        namespaces = [module for module, _, _ in self._namespaces]
        self._guard(StateGuard.add_settings, self._names, namespaces)
        settings = [*settings_that_are_set(self._names), *properties_named(self._assigned, namespaces)]
        self.holders += [Holder("", setting, SETTING) for setting in settings]
        if any(name.startswith(("register_module_", "register_optimizer_")) for name in self._names):
            tables = (*global_module_hooks(), *global_optimizer_hooks())
            self.holders += [Holder("hooks of all modules or optimizers", table, kinds.DICT) for table in tables]
        if "initial_seed" in self._names:
            for generator in (torch.default_generator, *self.generators):
                self._guard(StateGuard.add_seed, generator)

    def _guard_hooks_of_all(self) -> None:
        if not self.modules:  # which are compared with them
            self._guard(StateGuard.add_hooks, global_module_hooks())
        if any(is_a(holder.owner, Optimizer) for holder in self.holders):
            self._guard(StateGuard.add_hooks, global_optimizer_hooks())

    def _guard(self, add: Callable[[StateGuard, *Ts], None], *args: *Ts) -> None:
        """Something is compared at each call; what arguments hold is compared by patterns."""
        if not self._in_argument:
            self._compared.append((add, args))

    @contextlib.contextmanager
    def _outside_arguments(self) -> Iterator[None]:
        """Classes, globals and Python modules are one for all calls, however they are reached."""
        before, self._in_argument = self._in_argument, False
        try:
            yield
        finally:
            self._in_argument = before

    @property
    def _is_of_no_use(self) -> bool:
        """Whether the program puts names together, and only the code that runs can tell what it reads."""
        return self._computes_names and self._scope.needs_names

    # ----------------------------------------------------------------------------------------- functions
    def _enter_function(self, function: Any) -> None:
        if not is_a(function, types.FunctionType) or id(function) in self._seen:
            return
        if self._scope.calls(function.__code__):
            self._seen[id(function)] = function
            self._functions.append(function)
            if self._in_argument:
                self._private.add(id(function))

    def _look_at_functions(self) -> None:
        while (self._functions or self._later) and not self._is_of_no_use:
            while self._functions and not self._is_of_no_use:
                function = self._functions.pop()
                before = self._in_argument
                self._in_argument = before or id(function) in self._private
                self._look_at(function)
                self._in_argument = before
            for module, path, seen in self._namespaces:
                self._look_up(module, path, seen)
            if not self._functions:
                later, self._later = self._later, []
                for look in later:
                    look()

    def _enter_if_named(self, name: str, function: types.FunctionType) -> None:
        if name in self._names:
            self._enter_function(function)
        else:
            self._unnamed.setdefault(name, []).append(function)

    def _look_at(self, function: types.FunctionType) -> None:
        name, code = function.__name__, function.__code__
        in_library = is_library_function(function)
        if function.__closure__:
            for variable, cell in zip(code.co_freevars, function.__closure__, strict=True):
                if not (in_library and variable in _LIBRARY_CACHES):
                    self._look_at_cell(f"{variable} (closure of {name})", cell)
        if in_library:  # a wrapper around the user's function, or a function of torch that the program calls
            self._look_for(frozenset({name}))  # by whatever name
            return
        self._guard(StateGuard.add_function, function)
        self.holders.append(Holder(name, function, kinds.FUNCTION, self._in_argument))
        for where, held in ((f"defaults of {name}", function.__defaults__), (f"attributes of {name}", vars(function))):
            values = held.values() if isinstance(held, dict) else held or ()
            if not are_settled(values):
                self._visit_items(where, held, kinds.TUPLE if isinstance(held, tuple) else kinds.DICT)
        if function.__kwdefaults__:
            self._visit_items(f"defaults of {name}", function.__kwdefaults__, kinds.DICT)
        names = names_in(code)
        self._computes_names |= names.computed
        self.compares_objects |= names.compares
        with self._outside_arguments():
            self._look_at_globals(function.__globals__, names)
            if self._scope.finds_any_name and _reads_namespace(function.__globals__, names):
                self._look_at_all_globals(function.__globals__)
        if names.stored:
            self.stored_globals += [(f"{v} (global)", function.__globals__, v) for v in sorted(names.stored)]
        self._assigned |= names.assigned
        self._look_for(names.attributes)

    def _look_for(self, names: frozenset[str]) -> None:
        """Names that stand in the program, which may call methods by them."""
        new = names - self._names
        self._names |= new
        for attribute in new & self._unnamed.keys():
            for member in self._unnamed.pop(attribute):
                self._enter_function(member)

    def _look_at_cell(self, path: str, cell: types.CellType) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell
        self.holders.append(Holder(path, cell, kinds.CELL, self._in_argument))
        if kinds.CELL.read(cell):
            self.cells.append((path, cell))
            value, source = cell.cell_contents, Source(cell, "cell", None, path)
            if self._in_argument:
                self._visit(source, value)
            elif is_plain(value):
                self.plain.append((source, value))
                self._note_containers(path, value)
            else:
                if not is_a(value, Tensor):
                    self.fixed.append((source, value))
                self._visit(source, value)

    def _look_at_globals(self, namespace: dict[str, Any], names: Names) -> None:
        seen = self._seen_globals.setdefault(id(namespace), set())
        for name in sorted(names.loaded - seen):
            value = namespace.get(name, ABSENT)
            if value is ABSENT:
                self._guard(StateGuard.add_item, namespace, name, ABSENT)
                if name in vars(builtins):
                    self._guard(StateGuard.add_item, vars(builtins), name, vars(builtins)[name])
            else:
                self._visit_item(Source(namespace, "item", name, f"{name} (global)"), value)
        seen |= names.loaded
        if names.imported:
            self._computes_names |= ANY_MODULE in names.imported
            for name, module in _imported(names.imported, self._scope.knows_code):
                if not is_a(module, types.ModuleType):  # some packages put other objects there
                    self._visit_item(Source(sys.modules, "item", name, name), module)
                    continue
                if not is_library_module(module):
                    self._guard(StateGuard.add_item, sys.modules, name, module)
                self._enter_namespace(module, name)

    def _look_at_all_globals(self, namespace: dict[str, Any]) -> None:
        """A namespace that is read by names which stand nowhere."""
        if id(namespace) not in self._seen:
            self._seen[id(namespace)] = namespace
            self._guard(StateGuard.add_table, namespace)
            self._visit_items("", namespace, kinds.DICT)

    # ---------------------------------------------------------------------------------------- namespaces
    def _enter_namespace(self, module: types.ModuleType, path: str) -> None:
        """A Python module: of what is in it, the names that stand in the program count."""
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        if not is_library_module(module):
            self.holders.append(Holder(path, module, kinds.NAMESPACE))
            self.lifetime.hold(module)  # its namespace is kept, and may lead back to it
        self._namespaces.append((module, path, set()))
        self._look_up(*self._namespaces[-1])

    def _look_up(self, module: types.ModuleType, path: str, seen: set[str]) -> None:
        table = vars(module)
        new = self._names - seen
        seen |= new
        in_library = is_library_module(module)
        with self._outside_arguments():
            for name in sorted(new & table.keys()):
                source = Source(table, "item", name, f"{path}.{name}")
                if in_library:
                    self._look_up_in_library(source, table[name])
                else:
                    self._visit_item(source, table[name])
            if in_library:
                self._note_assigned(table, path)
            else:
                self._guard(StateGuard.add_absent, table, frozenset(new - table.keys()))
                if "__getattr__" in table:
                    self._visit_item(Source(table, "item", "__getattr__", f"{path}.__getattr__"), table["__getattr__"])

    def _note_assigned(self, table: dict[str, Any], path: str) -> None:
        """Variables of a module of torch's or Python's that the program may assign: `sys.stdout`."""
        for name in sorted(self._assigned & table.keys()):
            if (id(table), name) not in self._noted:
                self._noted.add((id(table), name))
                self.stored_globals.append((f"{path}.{name}", table, name))

    def _look_up_in_library(self, source: Source, value: Any) -> None:
        self._computes_names |= id(value) in _LOOK_UP
        self._guard(StateGuard.add_item, source.owner, source.key, value)
        if is_a(value, types.ModuleType):
            self._enter_namespace(value, source.path)
        elif value is os.getenv:
            self._visit(source, os.environ)
        elif is_a(value, types.FunctionType) and is_library_function(value):
            self._enter_library(value.__module__)
        elif is_a(value, types.FunctionType) or _is_of_python(source.owner, value):  # one of the user's in its place
            self._visit(source, value)

    def _enter_library(self, name: str | None) -> None:
        """A namespace of torch that its own code uses: what is in it may be replaced."""
        module = sys.modules.get(name or "")
        if name is not None and name.startswith("torch") and module is not None:
            self._guard(StateGuard.add_library, vars(module))

    # ------------------------------------------------------------------------------------------- classes
    def _enter_class(self, kind: type, called: bool = False) -> None:
        """The functions of a class of the user's that the program may come to call, which read globals of their own.

        A method is called by its name, which stands in the function that calls it, or by Python and torch, which know
        it from a class of their own. Making an object calls more of them.
        """
        if (id(kind), called) in self._seen_classes:
            return
        with self._outside_arguments():
            self._enter_bases(kind, called)
            self._enter_bases(type(kind), called=False)

    def _enter_bases(self, kind: type, called: bool) -> None:
        for base in kind.__mro__:
            if (id(base), called) in self._seen_classes:
                continue
            self._seen_classes.add((id(base), called))
            if is_library_class(base):
                if base.__module__.startswith("torch."):
                    if found_where_it_says(base):
                        self._guard(StateGuard.add_library, class_dict(base))
                    else:  # it was made for one module (parametrizations), and goes with that
                        self._guard(StateGuard.add_class, base)
                    self._enter_library(base.__module__)
                    self._enter_library("torch.nn.functional")
                continue
            if id(base) not in self._seen:
                self._enter_members(base)
            for name, function, use in methods_of(base):
                known = self._scope.finds_any_name or name in self._names
                if use == "to prepare one" and not self._scope.knows_code:  # which has the names of what tensors do
                    self._later.append(functools.partial(self._enter_if_named, name, function))
                elif use == "by others" or known or (use == "to make one" and called):
                    self._enter_function(function)
                elif use == "by name":
                    self._unnamed.setdefault(name, []).append(function)

    def _enter_members(self, kind: type) -> None:
        """What a class of the user's holds beside its methods."""
        self._seen[id(kind)] = kind
        self._guard(StateGuard.add_class, kind)
        if is_a(kind, abc.ABCMeta):
            self._guard(StateGuard.add_other, kind, kinds.REGISTERED)
        self.holders.append(Holder(kind.__qualname__, kind, kinds.CLASS))
        for function in registered_with_pytree(kind):
            self._enter_registered(function, f"what takes {kind.__qualname__} apart")
        tables_of_enums = is_a(kind, enum.EnumMeta)  # in which Python notes combinations of flags when they are met
        for name, value in list(vars(kind).items()):
            if type(value) in _NO_STATE or (tables_of_enums and name.startswith("_") and name.endswith("_")):
                continue
            path = f"{kind.__qualname__}.{name}"
            if is_a(value, Tensor):
                self._found(value, Source(weakly(kind), "attribute", name, path))
            elif not self._scope.knows_code and is_a(value, type):
                self._later.append(functools.partial(self._enter_class, value, called=True))
            elif _may_hold_state(value) and not name.startswith("__"):
                self._visit_value(Source(weakly(kind), "attribute", name, path), value)

    def _enter_registered(self, function: Any, path: str) -> None:
        """A function that torch calls for the objects of a class, if it may have done so."""
        inner = function.func if is_a(function, functools.partial) else function
        if is_a(inner, types.FunctionType) and self._scope.calls(inner.__code__):
            self._visit(Source(function, "held", None, path), function)

    def _enter_subclasses(self) -> None:
        """A program that asks classes for their subclasses finds those of any class of the user's."""
        pending = [kind for kind in self._seen.values() if is_a(kind, type)]
        while pending:
            kind = pending.pop()
            self._guard(StateGuard.add_other, kind, kinds.SUBCLASSES)
            for found in kinds.SUBCLASSES.read(kind).values():
                if id(found) not in self._seen:
                    self._enter_class(found, called=True)
                    pending.append(found)
            self._look_at_functions()

    # ------------------------------------------------------------------------------------------- modules
    def _enter_module(self, module: nn.Module, path: str, own_hooks: bool = True) -> None:
        known = self.modules_in_arguments if self._in_argument else self.modules
        for name, child in module.named_modules():
            if id(child) not in self.modules and id(child) not in known:
                self._seen[id(child)] = child
                script = script_part(child)
                if script is not None:
                    self._visit(Source(script, "held", None, path), script)
                place = ".".join(part for part in (path, name) if part)
                read = None if is_library_class(type(child)) else self._scope.reads(type(child))
                parts = known[id(child)] = ModuleParts(place, child, own_hooks or child is not module, read)
                self._enter_class(type(child))
                self._enter_module_parts(parts)

    def _enter_module_parts(self, parts: ModuleParts) -> None:
        """What one module leads to, but for its children."""
        path, module = parts.path, parts.module
        if not self._in_argument:
            for table in (module._parameters, module._buffers):
                if table:
                    self.sources.add_table(path, table)
        if has_slots(type(module)):
            self._visit_slots(module, path)
        if "parametrizations" in module._modules:
            _refuse_cached_parametrizations(path)
            self._guard(StateGuard.add_setting, cached_parametrizations, 0)
        if len(parts.filled) > 1:
            self._enter_hooks(path, parts.called_hooks())
        attributes, named = vars(module), self._scope.reads(type(module))
        others = [(key, attributes.get(key)) for key in parts.others]
        held = [(key, value) for key, value in others if type(value) is not tuple or not are_settled(value)]
        for key, value in (*parts.containers, *held):
            if named is None or key in named:
                self._visit_attribute(attributes, key, value, _join(path, key))

    def _visit_slots(self, module: nn.Module, path: str) -> None:
        """What a module holds outside of its dict; a compiled one leads to its original, which runs in its place."""
        self.holders.append(Holder(path, module, kinds.SLOTS, self._in_argument))
        self._guard(StateGuard.add_holder, module, kinds.SLOTS)
        for key, value in kinds.SLOTS.read(module).items():
            program = attributes_of(value).get("__wrapped__")
            if isinstance(program, Forward):
                self._enter_module(program.module, path)
            else:
                self._visit(Source(weakly(module), "attribute", key, _join(path, key)), value)

    def _enter_hooks(self, path: str, tables: Iterable[dict[Any, Any]]) -> None:
        """Hooks are functions that the program calls."""
        for table in tables:
            for hook in list(table.values()):
                if not is_plain(hook):
                    self._visit(Source(hook, "held", None, f"a hook of {path}"), hook)

    def _visit_attribute(self, table: dict[str, Any], key: str, value: Any, path: str) -> None:
        """Attributes of modules are compared together; what they lead to is compared here."""
        if is_a(value, Tensor) or not is_plain(value):
            self._visit(Source(table, "item", key, path), value)
        else:
            self._note_containers(path, value)

    # -------------------------------------------------------------------------------------------- values
    def _visit_item(self, source: Source, value: Any) -> None:
        """An item of a dict of which other items do not count: it is compared here."""
        if is_a(value, Tensor):
            self._guard(StateGuard.add_item, source.owner, source.key, value)
            self._found(value, source)
        elif is_plain(value) and type(value) not in PLAIN:
            self._visit_value(source, value)
        else:
            self._guard(StateGuard.add_item, source.owner, source.key, value)
            self._visit(source, value)

    def _visit_value(self, source: Source, value: Any) -> None:
        """Something that is compared here if it is a container of plain values, and by its owner if not."""
        if is_plain(value) and type(value) not in PLAIN:
            if not self._in_argument:
                self.plain.append((source, value))
            self._note_containers(source.path, value)
        else:
            self._visit(source, value)

    def _note_containers(self, path: str, value: Any) -> None:
        """Containers of plain values: a program may write to them."""
        for kind in (() if type(value) in PLAIN else kinds_of(value)) or ():
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self.holders.append(Holder(path, value, kind, self._in_argument))
                for key, item in kind.read(value).items():
                    self._inside.setdefault(id(item), (value, key))
                    self._note_containers(kind.path(path, key), item)

    def _visit(self, source: Source, value: Any) -> None:
        """Whatever a value leads to; the value itself is compared by what holds it."""
        kind = type(value)
        if kind is types.FunctionType:
            self._enter_function(value)
        elif kind in PLAIN:
            return
        elif issubclass(kind, Tensor):
            self._found(value, source)
        elif id(value) in self._seen:
            return
        elif issubclass(kind, nn.Module):
            self._enter_module(value, source.path.split(" ")[0])
        elif issubclass(kind, types.ModuleType):
            self._enter_namespace(value, source.path)
        elif issubclass(kind, type):
            self._enter_class(value, called=True)
        elif kind is types.CellType:
            self._look_at_cell(source.path, value)
        elif issubclass(kind, enum.Enum):  # one for all calls, however it is reached
            self._seen[id(value)] = value
            with self._outside_arguments():
                self._visit_object(source.path, value)
        else:
            self._seen[id(value)] = value
            self._visit_object(source.path, value)

    def _visit_object(self, path: str, value: Any) -> None:
        if self._schedules is not None and not self._in_argument and self._schedules.takes(path, value):
            self.lifetime.hold(value)
            return
        found = kinds_of(value)
        self._computes_names |= id(value) in _LOOK_UP
        if is_a(value, types.BuiltinFunctionType):
            self._look_for(frozenset({value.__name__}))
        if is_a(value, torch.Generator):
            self.generators.append(value)
        if found is None and is_plain(value):  # a number of numpy's, say, which its owner compares
            return
        if found is None:
            why = f"is of the type {type(value).__module__}.{type(value).__qualname__}"
            self.unknown.append(Unfollowed(path, why, _is_used_up(value)))
            self._hidden_state.append(self.unknown[-1])
            return
        if len(self.holders) > _MOST_HOLDERS and self._scope.reads_everything:
            self.unknown.append(Unfollowed(path, "is one of too many objects that the program can reach"))
            return
        wrapped = attributes_of(value).get("__wrapped__")
        if is_a(wrapped, types.FunctionType):  # by a compiled function, say
            self._enter_function(wrapped)
        for kind in found:
            self._visit_as(kind, path, value)

    def _visit_as(self, kind: Kind, path: str, value: Any) -> None:
        self.holders.append(Holder(path, value, kind, self._in_argument))
        if kind.compared == "numbers" and size_of(value, kind) > _MOST_BYTES:
            self.unknown.append(Unfollowed(path, "is too large to be compared at each call"))
        else:
            self._guard(StateGuard.add_holder, value, kind)
        if kind is kinds.CACHE and remembers_tensors(value):  # and would remember those of the recording
            self._hidden_state.append(Unfollowed(path, "remembers what it gave for tensors", is_used_up=True))
        if kind in _HAVE_ATTRIBUTES:
            self._enter_class(type(value))
        if kind is kinds.GETTER:
            texts = (name for name in kinds.GETTER.read(value).values() if type(name) is str)
            named = frozenset(part for text in texts for part in text.split("."))
            self._named_by_getters |= named
            self._look_for(named)
        if kind.compared != "numbers":
            self._visit_items(path, value, kind)

    def _visit_items(self, path: str, owner: Any, kind: Kind) -> None:
        by_item = kind in (kinds.DICT, kinds.LIST, kinds.TUPLE, kinds.DEQUE)
        named = self._scope.reads(type(owner)) if kind is kinds.OBJECT else None
        table = attributes_of(owner) if kind is kinds.OBJECT else None
        for key, item in kind.read(owner).items():
            if type(item) in SETTLED or (named is not None and key not in named):
                continue
            full = kind.path(path, key)
            if by_item:
                source = Source(owner, "item", key, full)
            elif table is not None and key in table:
                source = Source(table, "item", key, full)
            elif kind.is_attribute and str(key).isidentifier():
                source = Source(weakly(owner), "attribute", key, full)
            else:
                source = Source(item, "held", None, full)
            if kind is kinds.DICT or kind is kinds.OBJECT:
                self._visit_value(source, item)
            else:
                self._visit(source, item)
            if kind is kinds.DICT and type(key) not in SETTLED:
                self._visit(Source(key, "held", None, full), key)

    def _enter_tensor(self, tensor: Tensor, path: str) -> None:
        """A tensor that a program may put attributes on; one of a class of the user's runs the code of that class."""
        self.tensors.append((path, tensor))
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter and not is_library_class(type(tensor)):
            self._enter_class(type(tensor))

    def _found(self, tensor: Tensor, source: Source) -> None:
        self._enter_tensor(tensor, source.path)
        if not self._in_argument:
            self.sources.add(tensor, source)
            attributes = vars(tensor) if is_users_wrapper(tensor) else own_attributes(tensor)
            if attributes is not None and id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._guard(StateGuard.add_table, attributes)
                self._visit_items(source.path, attributes, kinds.DICT)
            elif not vars(tensor):
                self._guard(StateGuard.add_bare, tensor)


def _refuse_cached_parametrizations(path: str) -> None:
    """What a parametrization gives is kept elsewhere then, for later calls: those would find a recorded tensor."""
    if cached_parametrizations():
        raise UnsupportedError(
            f"{path or 'the module'} has parametrizations, and parametrize.cached() is at work: this cannot be "
            "compiled yet. Call it outside of that block, open that block in the program, or compile with "
            "fallback='eager'."
        )


_READ_NAMESPACE = frozenset(id(vars(builtins)[name]) for name in READ_NAMESPACE)
_LOOK_UP = frozenset(map(id, (getattr, vars, eval, exec, globals, locals)))  # whatever name they have in a program
_HAVE_ATTRIBUTES = (kinds.OBJECT, kinds.LOGGER, kinds.THREAD)
# A function that `functools.singledispatch` has made keeps what it has looked up, by the types of arguments.
_LIBRARY_CACHES = frozenset({"dispatch_cache", "cache_token"})


def _reads_namespace(namespace: dict[str, Any], names: Names) -> bool:
    """Whether a function may find any global of its namespace, by whatever name it knows `eval` and the like."""
    loaded = {id(namespace.get(name)) for name in names.loaded}
    by_module = id(builtins) in loaded and not READ_NAMESPACE.isdisjoint(names.attributes)
    return by_module or not READ_NAMESPACE.isdisjoint(names.loaded) or not _READ_NAMESPACE.isdisjoint(loaded)


def _is_of_python(namespace: dict[str, Any], value: Any) -> bool:
    """Whether a value is state of Python's own library that users change: `os.environ`, `sys.path`."""
    holds = is_a(value, (list, type(os.environ)))
    return holds and str(namespace["__name__"]).split(".")[0] in sys.stdlib_module_names


def _is_method(function: Any, kind: type) -> bool:
    """Whether objects of a class have a function as a method."""
    return getattr(kind, function.__name__, None) is function


def _is_used_up(value: Any) -> bool:
    """Whether reading takes something out of an object that cannot be put back: iterators and queues."""
    return hasattr(type(value), "__next__") or hasattr(type(value), "get_nowait")


_METHODS = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
_NO_STATE = PLAIN.union(_METHODS)  # what is in classes, but for very little


def _may_hold_state(value: Any) -> bool:
    """Whether something in a class is neither a method nor a plain value."""
    if is_a(value, _METHODS):
        return False
    return not hasattr(type(value), "__get__") or bool(kinds_of(value))  # fields of named tuples are in C


def _imported(names: frozenset[str], has_run: bool) -> list[tuple[str, Any]]:
    """Python modules of these names; any of the user's, where code has run that puts names of modules together."""
    found = [(name, sys.modules[name]) for name in sorted(names & sys.modules.keys())]
    if ANY_MODULE in names and has_run and not found:
        modules = [*sys.modules.items()]
        found = sorted((name, module) for name, module in modules if _is_users_module(module))
    return found


def _is_users_module(module: Any) -> bool:
    """Whether what stands among the Python modules is one (some packages put other objects there), and the user's."""
    return is_a(module, types.ModuleType) and not is_library_module(module)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
