"""Where a program finds things by itself: closures, globals, defaults, modules, attributes.

One walk goes over everything that the program can reach, whatever its kind (see `kinds`). A tensor that is found there
is a hidden input: it is read from its place at each call. Everything else is compared at each call (see `state_guard`).
Arguments are walked as well, for the functions that are reached through them; what they hold is compared with the
call's own arguments (see `patterns`).
"""

from __future__ import annotations

import abc
import builtins
import collections
import contextlib
import enum
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVarTuple

from torch import Tensor, nn

from .._torch import FakeTensor, SettingProperty, cached_parametrizations, global_module_hooks, settings_modules
from ..errors import ForegradError, UnsupportedError
from ..subclasses.layout import is_wrapper
from ..values import PLAIN, SETTLED, are_settled, is_plain, weakly
from .code import (
    ANY_MODULE,
    READ_NAMESPACE,
    CodeThatRan,
    Names,
    found_where_it_says,
    is_library_class,
    is_library_function,
    is_library_module,
    may_read_all,
    methods_of,
    names_in,
)
from .kinds import (
    ACCESSOR,
    ARRAY,
    BYTES,
    CACHE,
    CELL,
    CLASS,
    DEQUE,
    DICT,
    EXCEPTION,
    FACTORY,
    FROZENSET,
    FUNCTION,
    GETTER,
    LIST,
    LOGGER,
    MAPPING,
    METHOD,
    NAMESPACE,
    NDARRAY,
    OBJECT,
    PARTIAL,
    REGISTERED,
    SET,
    STREAM,
    SUBCLASSES,
    THREAD,
    TUPLE,
    VALUE,
    VARIABLE,
    VIEW,
    WEAK,
    Kind,
    Lifetime,
    attributes_of,
    class_dict,
    is_a,
    kinds_of,
    remembers_tensors,
    size_of,
)
from .patterns import ObjectPattern
from .state_guards import ABSENT, ModuleGuard, ModuleParts, StateGuard

Ts = TypeVarTuple("Ts")

_MOST_HOLDERS = 20_000  # that are walked before the code that runs has to tell what is read
_MOST_BYTES = 1 << 20  # of an array of numbers that is compared at each call


class Source(NamedTuple):
    """A place that can be read again: a cell, an item of a container, an attribute, or the object itself.

    "argument" is a tensor in an argument that is an object: the owner is the number of the leaf, the key that of the
    tensor in it. The owner of an attribute is not kept alive.
    """

    held: Any  # the owner, or what leads to it
    how: Literal["cell", "item", "attribute", "held", "argument"]
    key: Any
    path: str  # in the user's words

    @property
    def owner(self) -> Any:
        """What the place belongs to."""
        return self.held() if self.how == "attribute" else self.held

    def expression(self, owner: str, key: str) -> str:
        """Python text that reads the place."""
        match self.how:
            case "cell":
                return f"{owner}.cell_contents"
            case "item" | "argument":
                return f"{owner}[{key}]"
            case "attribute":
                return f"{owner}.{self.key}"
            case "held":
                return owner

    def reader(self) -> Callable[[], Any]:
        """Reads the place, at every call: as fast as can be."""
        match self.how:
            case "item":
                return functools.partial(operator.getitem, self.held, self.key)
            case "cell":
                return functools.partial(getattr, self.held, "cell_contents")
        return self.read

    def read(self) -> Any:
        """What is there now."""
        match self.how:
            case "cell":
                return self.owner.cell_contents
            case "item" | "argument":
                return self.owner[self.key]
            case "attribute":
                return getattr(self.owner, self.key)
            case "held":
                return self.owner


class FoundTensors(NamedTuple):
    """Tensors that a program finds by itself, to be told from arguments."""

    known: frozenset[int]  # ids of those that modules hold, and of those whose place cannot be read
    readers: list[Callable[[], Any]]

    def __bool__(self) -> bool:
        return bool(self.known or self.readers)

    def holds(self, tensor: Tensor) -> bool:
        """Whether one of them is this one."""
        return id(tensor) in self.known or any(read() is tensor for read in self.readers)


class Holder(NamedTuple):
    """An object of the user's that holds state, as one of the kinds that it is of."""

    path: str  # in the user's words
    owner: Any
    kind: Kind
    in_argument: bool = False  # it is reached through an argument only: each call has its own


class Reached(NamedTuple):
    """What a function leads to that none led to before it."""

    holders: Sequence[Holder]
    tensors: Sequence[tuple[str, Tensor]]
    stored_globals: Sequence[tuple[str, dict[str, Any], str]]
    modules: Mapping[int, ModuleParts]
    modules_in_arguments: Mapping[int, ModuleParts]


class FreeVariables:
    """Everything that a function can reach without being given it.

    Which functions it calls is told from the names in their code: more than are called. `ran`, the code that did run by
    its id, leaves out the others; where it cannot be known, `follows_all` takes in whatever may be called. A program
    that puts names together needs one of the two: without them, the walk ends where it does so.
    """

    def __init__(
        self,
        root: Callable[..., Any],
        arguments: Sequence[tuple[str, Any]] = (),
        ran: Mapping[int, types.CodeType] | None = None,
        reads: Names | None = None,
        follows_all: bool = False,
    ) -> None:
        self.plain: list[tuple[Source, Any]] = []  # containers of plain values, compared as a whole
        self.cells: list[tuple[str, types.CellType]] = []
        self.fixed: list[tuple[Source, Any]] = []  # what is in cells
        self.stored_globals: list[tuple[str, dict[str, Any], str]] = []
        self.lifetime = Lifetime()
        self.state = StateGuard(self.lifetime)
        self.holders: list[Holder] = []
        self.tensors: list[tuple[str, Tensor]] = []  # which the program may put attributes on
        self.modules: dict[int, ModuleParts] = {}  # by id
        self.modules_in_arguments: dict[int, ModuleParts] = {}
        self.patterns: dict[int, ObjectPattern] = {}  # of arguments that are objects, by the number of the leaf
        self.unknown: list[tuple[str, str]] = []  # what cannot be followed: its path, and why
        self.unknown_arguments: list[tuple[str, str]] = []
        self._hidden_state: list[tuple[str, str]] = []  # those whose state nobody can see or put back
        self._used_up: list[tuple[str, str]] = []  # iterators and queues among them
        self._tensors: dict[int, list[Source]] = {}  # by id: all places in which a tensor was found
        self._state: dict[int, list[Source]] = {}  # parameters and buffers of modules, once somebody asks
        self._tables: list[
            tuple[str, dict[str, Any], list[tuple[str, int]]]
        ] = []  # those that are not in it yet, by id
        self._seen: dict[int, Any] = {}  # by id; kept, so that an id stays its own
        self._inside: dict[
            int, tuple[Any, Any]
        ] = {}  # by id: what holds a container of plain values, and its key there
        self._ran = ran
        self._reads: Names | None = reads if ran is None else _names_of(ran.values())
        self._names: set[str] = {"forward"}  # that the program may look up in an object
        self._unnamed: dict[str, list[Any]] = {}  # members of classes that no function has named yet
        # What is far from the program, after what is near has told whether names in its code say all.
        self._later: list[Callable[[], None]] = []
        self._functions: list[types.FunctionType] = []  # still to be looked at
        self._namespaces: list[tuple[types.ModuleType, str, set[str]]] = []  # with the names looked up so far
        self._seen_classes: set[tuple[int, bool]] = set()
        self._seen_globals: dict[int, set[str]] = {}  # by the id of a namespace
        self._computes_names = False
        self.compares_objects = False  # a program may ask whether one tensor is another
        self._compared: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # how, once somebody wants to compare
        self._follows_all = follows_all  # whatever names could lead to
        self._in_argument = False
        self._named: dict[type, frozenset[str]] = {}  # see _may_read
        self.named_by_getters: set[str] = set()
        self._private: set[int] = set()  # ids of functions that are reached through arguments only
        self.guards_state = False
        self.modules_guard: ModuleGuard | None = None
        self.code_that_ran: CodeThatRan | None = None  # where names in code tell too little
        self.refusal: UnsupportedError | None = None  # what a program that runs was told, and may have caught
        with looked_at():
            self._walk(root, arguments)

    def note_state(self) -> None:
        """Note what each call compares, as it is now: before the program changes anything."""
        self._note_compared()
        self.modules_guard = ModuleGuard([*self.modules.values()], self.lifetime) if self.modules else None

    def tell(self, note: Callable[[Reached], None]) -> None:
        """Tell of whatever else comes to be reached while the program runs."""

    def noting_code(self) -> contextlib.AbstractContextManager[None]:
        """Notes which code runs, where that has to be known."""
        return contextlib.nullcontext()

    def recording_ends(self) -> None:
        """The program will not run again."""

    def _note_compared(self) -> None:
        with looked_at():
            noted, self._compared = self._compared, []
            for add, args in noted:
                add(self.state, *args)
            self.guards_state = self.state.finish()

    def _walk(self, root: Callable[..., Any], arguments: Sequence[tuple[str, Any]]) -> None:
        self._guard(StateGuard.add_library, class_dict(Tensor))
        if isinstance(root, nn.Module):
            self._enter_module(root, "")
        else:
            self._visit(Source(root, "held", None, ""), root)
        self._look_at_functions()
        self._enter_hooks("all modules", global_module_hooks())  # the program may make a module and call it
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
                self.unknown_arguments += [(path, f"is or holds a {kind.__name__}") for kind in pattern.unknown]
                for j, tensor in enumerate(pattern.tensors):
                    self._tensors.setdefault(id(tensor), []).append(Source(i, "argument", j, path))
                self._visit(Source(value, "held", None, path), looked_into)
            elif looked_into is not None:
                self._note_containers(path, value)
        self._in_argument = False
        self._look_at_functions()
        if not self.modules:
            self._guard(StateGuard.add_hooks, global_module_hooks())
        if "__subclasses__" in self._names:
            self._enter_subclasses()
        self._note_settings()

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
    def needs_code_that_runs(self) -> bool:
        """Whether names in code tell too little, so that what runs has to be noted."""
        return self._ran is None and (self._computes_names or bool(self.unknown))

    @property
    def _is_of_no_use(self) -> bool:
        """Whether the program puts names together: only the code that runs can tell what it reads."""
        return self._computes_names and self._ran is None and self._reads is None and not self._follows_all

    def changed_for_good(
        self, root: Callable[..., Any], arguments: Sequence[tuple[str, Any]] = ()
    ) -> list[tuple[str, str]]:
        """What a recording may change and nobody can put back, as far as the names in the program lead there."""
        if self._follows_all or not self._hidden_state:
            return self._hidden_state
        if self._is_of_no_use:
            return []
        named = Names(attributes=frozenset(self._names))
        return FreeVariables(root, arguments, reads=named)._hidden_state

    def fix(self, owners: Iterable[Any]) -> None:
        """What calls write to must be the very same object, however alike another one may be."""
        tops = {id(value): source for source, value in self.plain}
        for owner in owners:
            while id(owner) in self._inside:
                outer, key = self._inside[id(owner)]
                self.state.add_identity(functools.partial(operator.getitem, outer, key), owner)
                owner = outer
            if id(owner) in tops:
                self.state.add_identity(tops[id(owner)].read, owner)
        self._relate_sources()
        self._note_compared()

    def require(self, objects: Iterable[Any]) -> None:
        """The program is let go with any of some objects; in arguments, too, they must be the very same ones."""
        fixed = {id(self.lifetime.hold(value)()) for value in objects}
        for pattern in self.patterns.values() if fixed else ():
            pattern.require(fixed)

    def knows(self, value: Any) -> bool:
        """Whether a value that can be referred to weakly is the user's, and no tensor: the program can reach it."""
        return id(value) in self._seen and type(value).__weakrefoffset__ != 0 and not is_a(value, Tensor)

    def release(self) -> None:
        """Let go of everything that only a recording needs; no argument stays alive."""
        self.plain.clear()
        self.fixed.clear()
        self.stored_globals.clear()
        self.modules.clear()
        self._state.clear()
        self._tables.clear()
        self.holders.clear()
        self.cells.clear()
        self.tensors.clear()
        self._seen.clear()
        self._inside.clear()
        self._tensors.clear()
        self.modules_in_arguments.clear()
        self._functions.clear()
        self._namespaces.clear()
        self._unnamed.clear()
        self._later.clear()
        self._named.clear()
        self._compared.clear()
        for pattern in self.patterns.values():
            pattern.release()

    def source_of(self, tensor: Tensor) -> Source:
        """Where a tensor was found; one that is nowhere to be found is held as it is."""
        found = self._known_source(tensor)
        if found is None:  # a method was called by a name that stands nowhere
            for member in itertools.chain.from_iterable(self._unnamed.values()):
                self._enter_function(member, "")
            self._unnamed.clear()
            self._look_at_functions()
            found = self._known_source(tensor)
        return found or Source(tensor, "held", None, f"a tensor of shape {tuple(tensor.shape)}")

    def _known_source(self, tensor: Tensor) -> Source | None:
        """A parameter or buffer belongs to its module, wherever else it is held."""
        return next(iter(self._sources(id(tensor))), None)

    def _sources(self, identity: int) -> list[Source]:
        """All places in which a tensor was found."""
        for path, table, before in self._tables:  # as they were found: the program may have exchanged them since
            for key, found in before:
                self._state.setdefault(found, []).append(Source(table, "item", key, _join(path, key)))
        self._tables.clear()
        return [*self._state.get(identity, ()), *self._tensors.get(identity, ())]

    def found_tensors(self) -> FoundTensors:
        """All tensors that were found outside of arguments."""
        self._sources(0)
        sources = [source for found in self._tensors.values() for source in found if source.how != "argument"]
        held = [id(source.held) for source in sources if source.how == "held"]
        readers = [source.reader() for source in sources if source.how != "held"]
        found = FoundTensors(frozenset((*self._state, *held)), readers)
        self.lifetime.when_gone(readers.clear)
        return found

    def sources_of_argument(self, tensor: Tensor) -> list[Source]:
        """Places that must hold the tensor that an argument is; those outside of arguments hold the same one."""
        found = [source for source in self._sources(id(tensor)) if source.how != "held"]
        inside = [source for source in found if source.how == "argument"]
        return inside + [source for source in found if source.how != "argument"][:1]

    def _relate_sources(self) -> None:
        """Of a tensor that is found in several places one is read: the others must hold it too."""
        self._sources(0)
        for identity in [*self._state, *self._tensors.keys() - self._state.keys()]:
            found = [source for source in self._sources(identity) if source.how not in ("held", "argument")]
            for other in found[1:] if len(found) > 1 else ():
                self.state.add_same(found[0].reader(), other.reader())

    # ----------------------------------------------------------------------------------------- functions
    def _enter_function(self, function: Any, path: str) -> None:
        if not is_a(function, types.FunctionType) or id(function) in self._seen:
            return
        if self._ran is None or id(function.__code__) in self._ran:
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
            self._enter_function(function, "")
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
            return
        self._guard(StateGuard.add_function, function)
        self.holders.append(Holder(name, function, FUNCTION, self._in_argument))
        for where, held in ((f"defaults of {name}", function.__defaults__), (f"attributes of {name}", vars(function))):
            values = held.values() if isinstance(held, dict) else held or ()
            if not are_settled(values):
                self._visit_items(where, held, TUPLE if isinstance(held, tuple) else DICT)
        if function.__kwdefaults__:
            self._visit_items(f"defaults of {name}", function.__kwdefaults__, DICT)
        names = names_in(code)
        self._computes_names |= names.computed
        self.compares_objects |= names.compares
        with self._outside_arguments():
            self._look_at_globals(function.__globals__, names)
            if (self._ran is not None or self._follows_all) and _reads_namespace(function.__globals__, names):
                self._look_at_all_globals(function.__globals__)
        if names.stored:
            self.stored_globals += [(f"{v} (global)", function.__globals__, v) for v in sorted(names.stored)]
        self._look_for(names.attributes)

    def _look_for(self, names: frozenset[str]) -> None:
        """Names that stand in the program, which may call methods by them."""
        new = names - self._names
        self._names |= new
        for attribute in new & self._unnamed.keys():
            for member in self._unnamed.pop(attribute):
                self._enter_function(member, "")

    def _look_at_cell(self, path: str, cell: types.CellType) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell
        self.holders.append(Holder(path, cell, CELL, self._in_argument))
        if CELL.read(cell):
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
            for name, module in _imported(names.imported, self._ran is not None):
                self._enter_namespace(module, name)

    def _look_at_all_globals(self, namespace: dict[str, Any]) -> None:
        """A namespace that is read by names which nobody knows."""
        if id(namespace) not in self._seen:
            self._seen[id(namespace)] = namespace
            self._guard(_add_table, namespace)
            self._visit_items("", namespace, DICT)

    # ---------------------------------------------------------------------------------------- namespaces
    def _enter_namespace(self, module: types.ModuleType, path: str) -> None:
        """A Python module: of what is in it, the names that stand in the program count."""
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        if not is_library_module(module):
            self.holders.append(Holder(path, module, NAMESPACE))
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
            if not in_library:
                self._guard(StateGuard.add_absent, table, frozenset(new - table.keys()))
                if "__getattr__" in table:
                    self._visit_item(Source(table, "item", "__getattr__", f"{path}.__getattr__"), table["__getattr__"])

    def _look_up_in_library(self, source: Source, value: Any) -> None:
        self._computes_names |= id(value) in _LOOK_UP
        self._guard(StateGuard.add_item, source.owner, source.key, value)
        if is_a(value, types.ModuleType):
            self._enter_namespace(value, source.path)
        elif is_a(value, types.FunctionType) and is_library_function(value):
            self._enter_library(value.__module__)
        elif is_a(value, types.FunctionType):  # one of the user's has taken its place
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
                known = self._ran is not None or self._follows_all or name in self._names
                if use == "to prepare one" and self._ran is None:  # which has the names of what tensors do
                    self._later.append(functools.partial(self._enter_if_named, name, function))
                elif use == "by others" or known or (use == "to make one" and called):
                    self._enter_function(function, "")
                elif use == "by name":
                    self._unnamed.setdefault(name, []).append(function)

    def _enter_members(self, kind: type) -> None:
        """What a class of the user's holds beside its methods."""
        self._seen[id(kind)] = kind
        self._guard(StateGuard.add_class, kind)
        if is_a(kind, abc.ABCMeta):
            self._guard(StateGuard.add_other, kind, REGISTERED)
        self.holders.append(Holder(kind.__qualname__, kind, CLASS))
        tables_of_enums = is_a(kind, enum.EnumMeta)  # in which Python notes combinations of flags when they are met
        for name, value in list(vars(kind).items()):
            if tables_of_enums and name.startswith("_") and name.endswith("_"):
                continue
            path = f"{kind.__qualname__}.{name}"
            if is_a(value, Tensor):
                self._found(value, Source(weakly(kind), "attribute", name, path))
            elif self._ran is None and is_a(value, type):
                self._later.append(functools.partial(self._enter_class, value, called=True))
            elif _may_hold_state(value) and not name.startswith("__"):
                self._visit_value(Source(weakly(kind), "attribute", name, path), value)

    def _enter_subclasses(self) -> None:
        """A program that asks classes for their subclasses finds those of any class of the user's."""
        pending = [kind for kind in self._seen.values() if is_a(kind, type)]
        while pending:
            kind = pending.pop()
            self._guard(StateGuard.add_other, kind, SUBCLASSES)
            for found in SUBCLASSES.read(kind).values():
                if id(found) not in self._seen:
                    self._enter_class(found, called=True)
                    pending.append(found)
            self._look_at_functions()

    # ------------------------------------------------------------------------------------------- modules
    def _enter_module(self, module: nn.Module, path: str) -> None:
        known = self.modules_in_arguments if self._in_argument else self.modules
        for name, child in module.named_modules():
            if id(child) not in self.modules and id(child) not in known:
                self._seen[id(child)] = child
                parts = known[id(child)] = ModuleParts(".".join(part for part in (path, name) if part), child)
                self._enter_class(type(child))
                self._enter_module_parts(parts)

    def _enter_module_parts(self, parts: ModuleParts) -> None:
        """What one module leads to, but for its children."""
        path, module = parts.path, parts.module
        if not self._in_argument:
            for table in (module._parameters, module._buffers):
                if table:
                    self._tables.append((path, table, [(key, id(tensor)) for key, tensor in table.items()]))
        if "parametrizations" in module._modules:
            _refuse_cached_parametrizations(path)
            self._guard(StateGuard.add_setting, cached_parametrizations, 0)
        if len(parts.filled) > 1:
            self._enter_hooks(path, [table for shown, table, _ in parts.filled if shown])
        attributes, named = vars(module), self._may_read(type(module))
        others = [(key, attributes.get(key)) for key in parts.others]
        held = [(key, value) for key, value in others if type(value) is not tuple or not are_settled(value)]
        for key, value in (*parts.containers, *held):
            if named is None or key in named:
                self._visit_attribute(attributes, key, value, _join(path, key))

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
        kinds = kinds_of(value) if type(value) not in PLAIN else ()
        for kind in kinds or ():
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
            self._enter_function(value, source.path)
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
        kinds = kinds_of(value)
        self._computes_names |= id(value) in _LOOK_UP
        if kinds is None and is_plain(value):  # a number of numpy's, say, which its owner compares
            return
        if kinds is None:
            why = f"is of the type {type(value).__module__}.{type(value).__qualname__}"
            self.unknown.append((path, why))
            self._hidden_state.append((path, why))
            if _is_used_up(value):
                self._used_up.append((path, why))
            return
        if len(self.holders) > _MOST_HOLDERS and self._reads_everything:
            self.unknown.append((path, "is one of too many objects that the program can reach"))
            return
        wrapped = attributes_of(value).get("__wrapped__")
        if is_a(wrapped, types.FunctionType):  # by a compiled function, say
            self._enter_function(wrapped, path)
        for kind in kinds:
            self.holders.append(Holder(path, value, kind, self._in_argument))
            self._compare(path, value, kind)
            if kind is CACHE and remembers_tensors(value):  # and would remember those of the recording
                self._hidden_state.append((path, "remembers what it gave for tensors"))
                self._used_up.append(self._hidden_state[-1])
            if kind in _HAVE_ATTRIBUTES:
                self._enter_class(type(value))
            if kind is GETTER:
                texts = (name for name in GETTER.read(value).values() if type(name) is str)
                found = frozenset(part for text in texts for part in text.split("."))
                self.named_by_getters |= found
                self._look_for(found)
            if kind not in _HOLD_NUMBERS:
                self._visit_items(path, value, kind)

    @property
    def _reads_everything(self) -> bool:
        """Whether any attribute may be read: the code that ran is not known, or computes names."""
        if isinstance(self._ran, CodeThatRan):
            return self._ran_reads_everything
        return self._reads is None or may_read_all(self._reads)

    @functools.cached_property
    def _ran_reads_everything(self) -> bool:
        return isinstance(self._ran, CodeThatRan) and self._ran.reads_everything

    def _may_read(self, kind: type) -> Container[str] | None:
        """Names of attributes that are read of objects of a class; None if it may be any."""
        if self._reads_everything:
            return None
        if isinstance(self._ran, CodeThatRan):
            if kind not in self._named:
                self._named[kind] = self._ran.names_for(kind)
            return self._named[kind]
        reads_itself = _reads_itself(kind) and (self._ran is not None or not issubclass(kind, nn.Module))
        return None if self._reads is None or reads_itself else self._reads.attributes

    def _compare(self, path: str, value: Any, kind: Kind) -> None:
        """How a holder is compared at each call."""
        if kind is DICT:
            self._guard(_add_table, value)
            if is_a(value, collections.OrderedDict):  # which does not count a new order as a change
                self._guard(StateGuard.add_sequence, value)
        elif kind is OBJECT:
            self._guard(_add_object, value)
        elif kind in (LIST, DEQUE, SET, FROZENSET):
            self._guard(StateGuard.add_sequence, value)
        elif kind in _HOLD_NUMBERS and size_of(value, kind) > _MOST_BYTES:
            self.unknown.append((path, "is too large to be compared at each call"))
        elif kind in _COMPARED_AS_READ:
            self._guard(StateGuard.add_other, value, kind)
        else:
            assert kind in _NEVER_CHANGES or kind.name.startswith(("random", "numpy")), kind

    def _visit_items(self, path: str, owner: Any, kind: Kind) -> None:
        by_item = kind in (DICT, LIST, TUPLE, DEQUE)
        named = self._may_read(type(owner)) if kind is OBJECT else None
        table = attributes_of(owner) if kind is OBJECT else None
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
            if kind is DICT or kind is OBJECT:
                self._visit_value(source, item)
            else:
                self._visit(source, item)
            if kind is DICT and type(key) not in SETTLED:
                self._visit(Source(key, "held", None, full), key)

    def _enter_tensor(self, tensor: Tensor, path: str) -> None:
        """A tensor that a program may put attributes on; one of a class of the user's runs the code of that class."""
        self.tensors.append((path, tensor))
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter and not is_library_class(type(tensor)):
            self._enter_class(type(tensor))

    def _found(self, tensor: Tensor, source: Source) -> None:
        self._enter_tensor(tensor, source.path)
        if not self._in_argument:
            self._tensors.setdefault(id(tensor), []).append(source)
            attributes = vars(tensor) if is_users_wrapper(tensor) else own_attributes(tensor)
            if attributes is not None and id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._guard(_add_table, attributes)
                self._visit_items(source.path, attributes, DICT)
            elif not vars(tensor):
                self._guard(StateGuard.add_bare, tensor)

    # ------------------------------------------------------------------------------------------ settings
    def _note_settings(self) -> None:
        """Settings of torch that the program may ask for: functions and properties that give a plain value."""
        for name in sorted(self._names):
            if name.startswith(("is_", "are_", "get_")) or name.endswith("_enabled"):
                for module in settings_modules():
                    read = vars(module).get(name)
                    if callable(read):
                        self._note_setting(read)
        for module, _, _ in self._namespaces:
            if type(module) is not types.ModuleType and is_library_module(module):
                members = {name: member for base in type(module).__mro__ for name, member in vars(base).items()}
                for name in sorted(self._names & members.keys()):
                    if isinstance(members[name], SettingProperty):
                        self._note_setting(functools.partial(getattr, module, name))

    def _note_setting(self, read: Callable[[], Any]) -> None:
        try:
            value = read()
        except (TypeError, RuntimeError, AssertionError, AttributeError):  # takes arguments, or asks a device not here
            return
        if is_plain(value):
            self._guard(StateGuard.add_setting, read, value)


@contextlib.contextmanager
def looked_at() -> Iterator[None]:
    """Objects of the user's are looked at: where that cannot be done, the program is refused."""
    try:
        yield
    except ForegradError:
        raise
    except RecursionError as error:
        raise UnsupportedError(
            "the program can reach objects that lead to others so many times in a row that they cannot be followed. "
            "Keep them in a list, raise Python's recursion limit, or compile with fallback='eager'."
        ) from error
    except Exception as error:
        raise UnsupportedError(
            f"the program can reach an object that cannot be looked at: {type(error).__name__}: {error}. Pass what the "
            "program needs of it as an argument, or compile with fallback='eager'."
        ) from error


def refuse_inputs_as_keys(holders: Iterable[Holder], inputs: Iterable[Any]) -> None:
    """Refuse a program that can reach a set or dict in which one of its inputs is a key: tensors are keys by identity,
    and what stands for an input while recording is another tensor."""
    given = {id(value) for value in inputs if is_a(value, Tensor)}
    for path, owner, kind, _ in holders if given else ():
        if kind not in (SET, FROZENSET, DICT) or {str}.issuperset(map(type, kind.read(owner))):
            continue
        if any(id(key) in given for key in kind.read(owner)):
            raise UnsupportedError(
                f"the program can reach {path}, in which a tensor that it is given is a key: this cannot be compiled "
                "yet. Keep tensors in a list, pass another tensor, or compile with fallback='eager'."
            )


def _refuse_cached_parametrizations(path: str) -> None:
    """What a parametrization gives is kept elsewhere then, for later calls: those would find a recorded tensor."""
    if cached_parametrizations():
        raise UnsupportedError(
            f"{path or 'the module'} has parametrizations, and parametrize.cached() is at work: this cannot be "
            "compiled yet. Call it outside of that block, or compile with fallback='eager'."
        )


def refuse_unknown(unknown: Sequence[tuple[str, str]]) -> None:
    """Refuse a program that can reach what cannot be followed."""
    for path, why in unknown:
        raise UnsupportedError(
            f"the program can reach {path}, which {why}: whether it is the same at the next call cannot be seen. Pass "
            "what the program needs of it as an argument, or compile with fallback='eager'."
        )


_HOLD_NUMBERS = (BYTES, ARRAY, NDARRAY, VIEW, STREAM)
_COMPARED_AS_READ = (*_HOLD_NUMBERS, VARIABLE, CACHE, WEAK, MAPPING, FACTORY, PARTIAL, LOGGER, THREAD, EXCEPTION)
_READ_NAMESPACE = frozenset(id(vars(builtins)[name]) for name in READ_NAMESPACE)
_LOOK_UP = frozenset(map(id, (getattr, vars, eval, exec, globals, locals)))  # whatever name they have in a program
_HAVE_ATTRIBUTES = (OBJECT, LOGGER, THREAD)
_NEVER_CHANGES = (TUPLE, METHOD, ACCESSOR, VALUE, GETTER)

# A function that `functools.singledispatch` has made keeps what it has looked up, by the types of arguments.
_LIBRARY_CACHES = frozenset({"dispatch_cache", "cache_token"})


def _reads_namespace(namespace: dict[str, Any], names: Names) -> bool:
    """Whether a function may find any global of its namespace, by whatever name it knows `eval` and the like."""
    loaded = {id(namespace.get(name)) for name in names.loaded}
    by_module = id(builtins) in loaded and not READ_NAMESPACE.isdisjoint(names.attributes)
    return by_module or not READ_NAMESPACE.isdisjoint(names.loaded) or not _READ_NAMESPACE.isdisjoint(loaded)


def _reads_itself(kind: type) -> bool:
    """Whether methods of a library read attributes of an object, which no name in the program tells (`UserDict`)."""
    return any(is_library_class(base) and _has_python_code(base) for base in kind.__mro__)


@functools.cache
def _has_python_code(kind: type) -> bool:
    """Whether a class of a library is written in Python."""
    return any(type(member) is types.FunctionType for member in vars(kind).values())


def _is_used_up(value: Any) -> bool:
    """Whether reading takes something out of an object that nobody can put back: iterators and queues."""
    return hasattr(type(value), "__next__") or hasattr(type(value), "get_nowait")


def own_attributes(tensor: Tensor) -> dict[str, Any] | None:
    """What the user has put on a tensor, if anything; what a front end or a wrapper subclass keeps is not meant."""
    held = vars(tensor)
    if not held or isinstance(tensor, FakeTensor) or is_wrapper(tensor):
        return None
    return None if all(name.startswith("_dynamo_") for name in held) else held


def is_users_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a wrapper subclass of the user's, who may read and set any attribute of it."""
    return is_wrapper(tensor) and not is_library_class(type(tensor))


def _add_table(state: StateGuard, table: dict[Any, Any]) -> None:
    state.add_table(table, without=_compared_whole(table))


def _add_object(state: StateGuard, owner: Any) -> None:
    state.add_object(owner, without=_compared_whole(attributes_of(owner)))


def _compared_whole(items: Mapping[Any, Any]) -> list[Any]:
    """Keys of containers of plain values: these are compared one by one, by what is in them."""
    return [key for key, value in items.items() if type(value) not in PLAIN and is_plain(value)]


def _may_hold_state(value: Any) -> bool:
    """Whether something in a class is neither a method nor a plain value."""
    skipped = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
    if type(value) in PLAIN or is_a(value, skipped):
        return False
    return not hasattr(type(value), "__get__") or bool(kinds_of(value))  # fields of named tuples are in C


def _names_of(ran: Iterable[types.CodeType]) -> Names:
    return Names(attributes=frozenset().union(*(names_in(code).attributes for code in ran)))


def _imported(names: frozenset[str], has_run: bool) -> list[tuple[str, types.ModuleType]]:
    """Python modules of these names; any of the user's, where code has run that puts names of modules together."""
    found = [(name, sys.modules[name]) for name in sorted(names & sys.modules.keys())]
    if ANY_MODULE in names and has_run and not found:
        modules = [*sys.modules.items()]
        found = sorted((name, module) for name, module in modules if _is_users_module(module))
    return [(name, module) for name, module in found if is_a(module, types.ModuleType)]


def _is_users_module(module: Any) -> bool:
    """Whether what stands among the Python modules is one (some packages put other objects there), and the user's."""
    return is_a(module, types.ModuleType) and not is_library_module(module)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
