"""Where stateful programs find values: a place is put around a value, or around another place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One way in which an object holds a value.

    Args:
        name: As it is counted in the summary.
        define: Lines that define `{o}` around the value `{v}`; `{O}` is a class of its own.
        path: How the value is reached from `{o}`.
        assign: How another value `{v}` takes its place, at `{p}`; nothing where none can.
        events: Other ways in which it gets another value `{v}` between calls.
        weight: How often it is drawn.
    """

    name: str
    define: str
    path: str
    assign: str = "{p} = {v}"
    events: tuple[str, ...] = ()
    weight: float = 1.0


def _holder(lines: str, make: str = "{O}({v})") -> str:
    return f"{lines}\n\n\n{{o}} = {make}"


_PROPERTY = """class {O}:
    def __init__(self, p):
        self.held = p

    @property
    def p(self):
        return self.held


{o} = {O}({v})"""

_GETATTR = """class {O}:
    def __init__(self, p):
        self.held = {'p': p}

    def __getattr__(self, name):
        return self.__dict__['held'][name]


{o} = {O}({v})"""

_CELL = """def make_{o}(p):
    def get():
        return p

    def put(value):
        nonlocal p
        p = value

    return get, put


{o} = make_{o}({v})"""

_METHOD = """class {O}:
    def __init__(self, p):
        self.p = p

    def get(self):
        return self.p


{o} = {O}({v}).get"""

_MODULES_DICT = """class {O}(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.held = {'p': p}


{o} = {O}({v})"""

PLACES = (
    Place(
        "attribute",
        _holder("class {O}:\n    def __init__(self, p):\n        self.p = p"),
        "{o}.p",
        events=("{o}.__dict__ = {'p': {v}}", "vars({o})['p'] = {v}", "{o}.__dict__.update(p={v})"),
        weight=2,
    ),
    Place(
        "slot", _holder("class {O}:\n    __slots__ = ('p',)\n\n    def __init__(self, p):\n        self.p = p"), "{o}.p"
    ),
    Place("namespace", "{o} = types.SimpleNamespace(p={v})", "{o}.p", events=("vars({o}).update(p={v})",)),
    Place("argparse", "{o} = argparse.Namespace(p={v})", "{o}.p"),
    Place("dataclass", _holder("@dataclasses.dataclass\nclass {O}:\n    p: object"), "{o}.p"),
    Place(
        "frozen dataclass",
        _holder("@dataclasses.dataclass(frozen=True)\nclass {O}:\n    p: object"),
        "{o}.p",
        "object.__setattr__({owner}, 'p', {v})",
    ),
    Place("class attribute", "class {O}:\n    p = {v}\n\n\n{o} = {O}", "{o}.p"),
    Place(
        "inherited attribute",
        "class {O}:\n    p = {v}\n\n\n{o} = type('{O}Child', ({O},), {'__module__': __name__})()",
        "{o}.p",
        "type({owner}).p = {v}",
        events=("{O}.p = {v}",),
    ),
    Place(
        "property",
        _PROPERTY,
        "{o}.p",
        "{owner}.held = {v}",
        events=("{O}.p = property(lambda self: {v})",),
    ),
    Place(
        "getattr",
        _GETATTR,
        "{o}.p",
        "{owner}.held['p'] = {v}",
    ),
    Place("list", "{o} = [0, {v}]", "{o}[1]", events=("{o}[:] = [0, {v}]",)),
    Place("nested list", "{o} = [[[[[{v}]]]]]", "{o}[0][0][0][0][0]"),
    Place("long list", "{o} = [*range(40), {v}]", "{o}[-1]"),
    Place("tuple", "{o} = (0, {v})", "{o}[1]", ""),
    Place("dict", "{o} = {'p': {v}}", "{o}['p']", events=("{o}.update(p={v})",)),
    Place("dict with equal keys", "{o} = {1: {v}}", "{o}[1]", events=("{o}.clear(); {o}[True] = {v}",)),
    Place("OrderedDict", "{o} = collections.OrderedDict(p={v})", "{o}['p']"),
    Place("defaultdict", "{o} = collections.defaultdict(list, p={v})", "{o}['p']"),
    Place("user dict", "{o} = collections.UserDict(p={v})", "{o}['p']"),
    Place("chain map", "{o} = collections.ChainMap({}, {'p': {v}})", "{o}['p']"),
    Place("deque", "{o} = collections.deque([{v}])", "{o}[0]"),
    Place("default argument", "def {o}(p={v}):\n    return p", "{o}()", "{owner}.__defaults__ = ({v},)"),
    Place(
        "keyword default",
        "def {o}(*, p={v}):\n    return p",
        "{o}()",
        "{owner}.__kwdefaults__ = {'p': {v}}",
        events=("{o}.__kwdefaults__['p'] = {v}",),
    ),
    Place("function attribute", "def {o}():\n    return {o}.p\n\n\n{o}.p = {v}", "{o}()", "{owner}.p = {v}"),
    Place(
        "cell",
        _CELL,
        "{o}[0]()",
        "{owner}[1]({v})",
        weight=2,
    ),
    Place(
        "global of a function",
        "held_{o} = {v}\n\n\ndef {o}():\n    return held_{o}",
        "{o}()",
        "",
        events=("held_{o} = {v}",),
        weight=2,
    ),
    Place(
        "own module",
        "{o} = types.ModuleType('{o}')\n{o}.p = {v}\nexec('def get(): return p', vars({o}))",
        "{o}.get()",
        "{owner}.p = {v}",
    ),
    Place(
        "partial",
        "def get_{o}(p):\n    return p\n\n\n{o} = functools.partial(get_{o}, {v})",
        "{o}()",
        "",
        events=("{o}.__setstate__((get_{o}, ({v},), {}, None))",),
    ),
    Place(
        "method",
        _METHOD,
        "{o}()",
        "{owner}.__self__.p = {v}",
        events=("{O}.p = {v}; del {o}.__self__.p",),
    ),
    Place("context variable", "{o} = contextvars.ContextVar('{o}')\n{o}.set({v})", "{o}.get()", "{owner}.set({v})"),
    Place("thread local", "{o} = threading.local()\n{o}.p = {v}", "{o}.p"),
    Place(
        "module attribute",
        _holder(
            "class {O}(torch.nn.Module):\n    def __init__(self, p):\n        super().__init__()\n        self.p = p"
        ),
        "{o}.p",
        weight=2,
    ),
    Place(
        "module's dict",
        _MODULES_DICT,
        "{o}.held['p']",
    ),
    Place("weak reference", "kept_{o} = types.SimpleNamespace(p={v})\n{o} = weakref.ref(kept_{o})", "{o}().p"),
)
