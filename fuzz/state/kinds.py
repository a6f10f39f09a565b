"""The values that stateful programs find, read, write, and see changed between calls.

In a template, `{p}` is the way to the value, `{a}` a tensor of the program, `{r}` a new one, `{f}` and `{i}` a number,
`{o}` and `{O}` the names of the object and of a class of its own, `{h}` a new name for a handle.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Args:
        name: As it is counted in the summary.
        makes: Expressions for different values of it; any of them may take the place of another between calls.
        define: Lines that define it as `{o}`, where an expression cannot.
        numbers: Expressions that read a number from it.
        tensors: Expressions that read a tensor from it.
        reads: Statements that use it in another way.
        assigns: What a program assigns in its place.
        writes: Statements of a program that change it.
        events: What happens to it between calls.
        weight: How often it is drawn.
    """

    name: str
    makes: tuple[str, ...] = ()
    define: str = ""
    numbers: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    assigns: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    weight: float = 1.0


# How a number decides what a program computes.
NUMBER_USES = (
    "{r} = {a} * {n}",
    "{r} = {a} + {n}",
    "{r} = {a} * float({n})",
    "{r} = {a}.sin() if {n} > 1 else {a}.cos()",
    "{r} = {a} if {n} else -{a}",
    "{r} = {a} + torch.full_like({a}, float({n}))",
    "{r} = torch.copysign({a}, torch.tensor(float({n})))",
    "{r} = {a} * (2 if type({n}) is int else 3)",
    "{r} = {a} * (2 if isinstance({n}, float) else 3)",
    "{r} = {a} / {n} if {n} else {a}",
    "{r} = {a}.roll(int({n}), 0)",
)

# With symbols, the type of a number that is an argument is theirs: docs/limits.md.
ABOUT_EXACT_TYPES = ("{r} = {a} * (2 if type({n}) is int else 3)",)

TENSOR_USES = (
    "{r} = {a} + {t}",
    "{r} = {a} * {t}",
    "{r} = {a} - {t}.detach()",
    "{r} = torch.where({t} > 0, {a}, -{a})",
    "{r} = {a} * {t}.mean()",
    "{r} = {a} * (2.0 if {t}.requires_grad else 0.5)",
    "{r} = {a} * (2.0 if {t}.grad is None else 0.5)",
    "{r} = {a} + {t}.dim()",
    "{r} = {a} * (2.0 if {t}.dtype is torch.float32 else 0.5)",
    "{r} = {a} * (1.0 + {t}._version)",
    "{r} = {a} * getattr({t}, 'tag', 0.5)",
    "{r} = {a} * (2.0 if {t}.is_leaf else 0.5)",
    "{r} = {a} * (2.0 if isinstance({t}, torch.nn.Parameter) else 0.5)",
    "{r} = {a} * (2.0 if {t} is {a} else 0.5)",
)

_TENSORS = (
    "torch.linspace(0.5, 2.0, 4)",
    "torch.full((4,), {f})",
    "torch.tensor([1.0, -2.0, 0.5, 3.0], requires_grad=True)",
    "torch.nn.Parameter(torch.linspace(-1.0, 1.0, 4))",
    "torch.tensor({f})",
    "torch.linspace(0.5, 2.0, 4, dtype=torch.float64)",
    "torch.linspace(1.0, 2.0, 8)[::2]",
)

_WITH_METHODS = """class {O}:
    factor = 2.0
    items = (1, 2)

    def __init__(self):
        self.n = 2
        self.last = None

    @property
    def double(self):
        return self.n * 2

    @staticmethod
    def shift(v):
        return v + 0.5

    @classmethod
    def wide(cls, v):
        return v * cls.factor

    def scaled(self, v):
        return v * self.n

    def __call__(self, v):
        return self.scaled(v) * self.factor


{o} = {O}()"""

_SLOTTED = """class {O}:
    __slots__ = ("n", "t", "last")

    def __init__(self):
        self.n, self.t = 2, torch.ones(4)

    def __call__(self, v):
        return v * self.n + self.t


{o} = {O}()"""

_WITH_EQUALITY = """class {O}:
    def __init__(self, n, t):
        self.n, self.t = n, t

    def __eq__(self, other):
        return isinstance(other, type(self)) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


{o} = {O}(2, torch.ones(4))"""

_DATACLASS = """@dataclasses.dataclass
class {O}:
    n: float = 2.0
    t: object = None
    tags: list = dataclasses.field(default_factory=list)


{o} = {O}(t=torch.linspace(0.5, 2.0, 4))"""

_FROZEN = """@dataclasses.dataclass(frozen=True)
class {O}:
    n: float = 2.0
    t: object = None


{o} = {O}(t=torch.linspace(0.5, 2.0, 4))"""

_NAMED = """{O} = collections.namedtuple("{O}", "n t")
{o} = {O}(2.0, torch.linspace(0.5, 2.0, 4))"""

_ENUM = """class {O}(enum.Enum):
    SINE = "sin"
    COSINE = "cos"


{o} = {O}.SINE"""

_INT_ENUM = """class {O}(enum.IntEnum):
    ONE = 1
    TWO = 2


{o} = {O}.TWO"""

_FUNCTION = """factor_{o} = 2.0


def {o}(v, power=2, *, shift=0.5):
    return v * power + shift * factor_{o}"""

_COUNTING = """calls_{o} = {"n": 0}


def {o}(v):
    calls_{o}["n"] += 1
    return v * 2"""

_CLOSURE = """def make_{o}():
    n, seen = 2, []

    def call(v):
        return v * n + len(seen)

    def count(v):
        nonlocal n
        n += 1
        return v * n

    def put(value):
        nonlocal n
        n = value
        seen.append(value)

    return call, count, put


{o} = make_{o}()"""

_CACHED = """table_{o} = {"n": 2.0}


@functools.lru_cache
def {o}(key):
    return table_{o}["n"] * key"""

# A user's module may be called like one of Python's, or like a part of a library.
MODULE_NAMES = ("helpers", "code", "test.helpers", "torchhelpers", "foregradhelpers")

_OWN_MODULE = """{o} = types.ModuleType("{name}")
exec("scale = 2.0\\nitems = [1]\\ndef f(v): return v * scale + len(items)\\ndef g(v): return f(v) * 2", vars({o}))"""

_GENERATOR = """def numbers_{o}():
    n = 1.0
    while True:
        yield n
        n += 1.0


{o} = numbers_{o}()"""

_PARTIAL = """def base_{o}(factor, v, shift=0.0):
    return v * factor + shift


{o} = functools.partial(base_{o}, 2.0, shift=0.5)"""

_SUBCLASS = """class {O}(torch.Tensor):
    calls = 0
    gain = 1.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        {O}.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


{o} = torch.ones(4).as_subclass({O})"""

_SCALED_BY_FUNCTION = """class {O}(torch.Tensor):
    gain = 2.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * {O}.gain if func is torch.Tensor.mul else result


{o} = torch.linspace(0.5, 2.0, 4).as_subclass({O})"""

_OWN_FUNCTION = """state_{o} = {"n": 2.0, "calls": 0}


class {O}(torch.autograd.Function):
    slope = 1.5

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v * state_{o}["n"]

    @staticmethod
    def backward(ctx, g):
        state_{o}["calls"] += {count}
        return g * state_{o}["n"] * {O}.slope


{o} = {O}.apply"""

_CACHED_PROPERTY = """class {O}:
    def __init__(self):
        self.n = 2

    @functools.cached_property
    def double(self):
        return self.n * 2

    @functools.cached_property
    def table(self):
        return torch.full((4,), float(self.n))


{o} = {O}()"""

_DESCRIPTOR = """class Given{O}:
    def __init__(self):
        self.n = 2

    def __get__(self, owner, kind):
        return self.n


class {O}:
    n = Given{O}()


{o} = {O}()"""

_METACLASS = """class Meta{O}(type):
    factor = 2.0

    def __len__(cls):
        return 3


class {O}(metaclass=Meta{O}):
    n = 2


{o} = {O}"""

PLAIN_KINDS = (
    Kind("int", ("2", "1", "3", "0", "True", "2.0"), numbers=("{p}",), assigns=("{p} + 1",), weight=2),
    Kind("float", ("0.5", "2.0", "0.0", "-0.0", "2"), numbers=("{p}",), assigns=("{p} * 2", "{p} + 1"), weight=2),
    Kind("bool", ("True", "False", "1"), numbers=("{p}",), assigns=("not {p}",)),
    Kind("complex", ("1.0 + 0.0j", "2.0 - 0.0j", "complex(2.0, 0.0)"), numbers=("{p}.real", "{p}.imag")),
    Kind(
        "str",
        ("'sin'", "'cos'", "'tanh'"),
        reads=(
            "{r} = getattr(torch, {p})({a})",
            "{r} = {a}.sin() if {p} == 'sin' else {a} * 2",
            "{r} = {a} * len({p})",
        ),
    ),
    Kind(
        "None", ("None", "0.5", "False"), reads=("{r} = {a} * 2 if {p} is None else {a} + {p}",), assigns=("{a}", "1.0")
    ),
    Kind(
        "Decimal",
        ("decimal.Decimal('2.0')", "decimal.Decimal('-0.0')", "decimal.Decimal('0.0')"),
        numbers=("float({p})",),
    ),
    Kind("Fraction", ("fractions.Fraction(1, 2)", "fractions.Fraction(3, 2)"), numbers=("float({p})", "{p}.numerator")),
    Kind(
        "numpy scalar",
        ("numpy.float32(2.0)", "numpy.float64(-0.0)", "numpy.float64(0.0)", "numpy.int64(2)"),
        numbers=("float({p})",),
    ),
    Kind("range", ("range(2)", "range(1, 3)"), numbers=("len({p})", "sum({p})")),
    Kind("slice", ("slice(0, 2)", "slice(None)"), reads=("{r} = {a} * {a}[{p}].sum()",)),
    Kind(
        "dtype",
        ("torch.float32", "torch.float64"),
        reads=("{r} = {a}.to({p}) * 2", "{r} = {a} + torch.ones(4, dtype={p})"),
    ),
    Kind("bytes", ("b'ab'", "b'a'"), numbers=("{p}[0] % 5", "len({p})")),
    Kind("size", ("torch.Size([2, 2])", "torch.Size([3])"), numbers=("{p}.numel()", "len({p})")),
)

CONTAINER_KINDS = (
    Kind(
        "ndarray",
        ("numpy.array([1.0, 2.0])", "numpy.array([0.5, -0.0])", "numpy.ones(2)"),
        numbers=("float({p}[0])", "float({p}.sum())"),
        tensors=("torch.from_numpy({p}).mean()", "torch.as_tensor({p}.tolist()).sum()"),
        writes=("{p}[0] += 1", "{p} *= 2"),
        events=("{p}[0] = {f}", "{p}.fill({f})"),
    ),
    Kind(
        "bytearray",
        ("bytearray(b'ab')", "bytearray(b'b')"),
        numbers=("{p}[0] % 5", "len({p})"),
        writes=("{p}.append(1)", "{p}[0] = 3"),
        events=("{p}[0] = {i}", "{p}.append({i})"),
    ),
    Kind(
        "array",
        ("array.array('d', [1.0, 2.0])",),
        numbers=("{p}[0]", "len({p})"),
        writes=("{p}[0] += 1",),
        events=("{p}[0] = {f}",),
    ),
    Kind(
        "list",
        ("[1, 2]", "[0.5]", "[1, 2.0]", "[2, 1]"),
        numbers=("len({p})", "sum({p})", "{p}[-1]"),
        writes=("{p}.append(1)", "{p}[0] += 1", "{p}.pop()", "{p}.insert(0, 2)"),
        events=("{p}.append({i})", "{p}[0] = {f}", "{p}.reverse()", "{p}.clear()", "{p}[:] = [{f}]"),
        weight=2,
    ),
    Kind(
        "long list",
        ("list(range(60))", "[1.0] * 60"),
        numbers=("{p}[-1]", "sum({p}) / 100"),
        writes=("{p}[-1] += 1",),
        events=("{p}[-1] = {f}", "{p}[40] += 7"),
    ),
    Kind(
        "list of tensors",
        ("[torch.ones(4)]", "[torch.ones(4), torch.full((4,), {f})]", "[]"),
        numbers=("len({p})",),
        tensors=("sum({p}, torch.zeros(4))",),
        writes=("{p}.append({a})", "{p}.append({a}.detach())", "{p}[:] = [{a}]", "{p}[0] = {a}", "{p} += [{a}]"),
        events=("{p}.append(torch.full((4,), {f}))", "{p}.clear()", "{p}.insert(0, torch.tensor({f}))"),
        weight=2,
    ),
    Kind(
        "tensor in two places",
        ("[torch.linspace(0.5, 2.0, 4)] * 2", "[torch.ones(4)] * 3"),
        tensors=("({p}[0] * {p}[1])", "({p}[1] - {p}[0])"),
        events=("{p}[0] = torch.full((4,), {f})", "{p}[1] = torch.full((4,), {f})", "{p}[0] = {p}[1]"),
    ),
    Kind(
        "dict",
        ("{'n': 2}", "{'n': 2.0, 'm': 1}", "{'m': 1, 'n': 3}"),
        numbers=("{p}['n']", "len({p})", "next(iter({p}.values()))", "{p}.get('m', 5)"),
        writes=("{p}['n'] += 1", "{p}['k'] = 1", "{p}.pop('m', 0)", "{p}.setdefault('d', 1)"),
        events=(
            "{p}['n'] = {f}",
            "{p}['m'] = {i}",
            "{p}.update(n={i})",
            "{p}['n'] = {p}.pop('n')",
            "{p}[1] = {p}[True] = 0",
        ),
        weight=2,
    ),
    Kind(
        "dict of tensors",
        ("{'t': torch.ones(4)}", "{'t': torch.linspace(0.5, 2.0, 4), 'u': torch.ones(())}"),
        numbers=("len({p})",),
        tensors=("{p}['t']",),
        writes=("{p}['t'] = {a}", "{p}['last'] = {a}.detach()", "{p}['t'].add_(1)", "{p}.setdefault('cache', {a})"),
        events=("{p}['t'] = torch.full((4,), {f})", "{p}['t'].mul_({f})", "{p}.pop('last', None)", "{p}['v'] = None"),
        weight=2,
    ),
    Kind(
        "set",
        ("{1, 2}", "{0.5}", "{2, 3}", "{-0.0}", "{0.0}"),
        numbers=("len({p})", "sum({p})", "(2 in {p})"),
        writes=("{p}.add(7)", "{p}.discard(1)", "{p}.add({a})"),
        events=("{p}.add({i})", "{p}.discard(2)", "{p}.clear()"),
    ),
    Kind("frozenset", ("frozenset({1, 2})", "frozenset({2})", "frozenset({2.0})"), numbers=("len({p})", "sum({p})")),
    Kind(
        "tuple",
        ("(1, 2)", "(1, 2.0)", "(True, 2)", "((1,), [2])"),
        reads=("{r} = {a} * {p}[-1] if isinstance({p}[0], int) else {a} * 3",),
    ),
    Kind(
        "deque",
        ("collections.deque([1, 2])", "collections.deque([1, 2], maxlen=2)"),
        numbers=("len({p})", "{p}[0]", "sum({p})"),
        writes=("{p}.append(3)", "{p}.popleft()", "{p}.rotate(1)"),
        events=("{p}.append({i})", "{p}[0] = {f}", "{p}.rotate(1)"),
    ),
    Kind(
        "deque of tensors",
        ("collections.deque(maxlen=2)", "collections.deque([torch.ones(4)])"),
        numbers=("len({p})",),
        writes=("{p}.append({a})", "{p}.appendleft({a}.detach())"),
        events=("{p}.append(torch.ones(4))", "{p}.clear()"),
    ),
    Kind(
        "Counter",
        ("collections.Counter('aab')", "collections.Counter(a=1)"),
        numbers=("{p}['a']", "{p}.total()"),
        writes=("{p}['a'] += 1", "{p}.update('b')"),
        events=("{p}['a'] = {i}", "{p}.update('a')"),
    ),
    Kind(
        "defaultdict",
        ("collections.defaultdict(int)", "collections.defaultdict(lambda: 2)"),
        numbers=("{p}['n']", "len({p})"),
        writes=("{p}['n'] += 1", "{p}['t'] = {a}"),
        events=("{p}['n'] = {i}", "{p}.default_factory = lambda: {i}"),
    ),
    Kind(
        "OrderedDict",
        ("collections.OrderedDict(a=1, b=2)", "collections.OrderedDict(b=2, a=1)"),
        numbers=("next(iter({p}.values()))", "{p}['a']"),
        writes=("{p}.move_to_end('a')", "{p}['t'] = {a}"),
        events=("{p}.move_to_end('a')", "{p}['a'] = {f}"),
    ),
    Kind(
        "mapping proxy", ("types.MappingProxyType({'n': 2})", "types.MappingProxyType({'n': 3})"), numbers=("{p}['n']",)
    ),
)

OBJECT_KINDS = (
    Kind(
        "object",
        ("{O}()",),
        _WITH_METHODS,
        numbers=("{p}.n", "{p}.factor", "{p}.double", "{p}.items[-1]"),
        reads=("{r} = {p}({a})", "{r} = {p}.scaled({a})", "{r} = {p}.shift({a})", "{r} = {p}.wide({a})"),
        writes=(
            "{p}.n += 1",
            "{p}.last = {a}",
            "{p}.extra = 2",
            "type({p}).last = {a}",
            "type({p}).count = 1",
            "{p}.__dict__['n'] = 5",
        ),
        events=(
            "{p}.n = {i}",
            "{O}.factor = {f}",
            "{p}.factor = {f}",
            "{O}.scaled = lambda self, v: v + self.n",
            "{O}.__call__ = lambda self, v: v - 1",
            "{O}.double = property(lambda self: self.n + 5)",
            "{O}.shift = staticmethod(lambda v: v - 0.5)",
            "{O}.items = ({i}, {f})",
            "{p}.scaled = lambda v: v * 5",
            "{p}.__class__ = type('{O}', ({O},), {'factor': {f}, '__module__': __name__})",
            "{p}.__dict__ = {'n': {i}, 'last': None}",
            "{p}.__dict__.update(n={f})",
            "{O}.scaled.__code__ = (lambda self, v: v * self.n * 3).__code__",
            "{O}.__getattribute__ = lambda self, name: 3 if name == 'n' else object.__getattribute__(self, name)",
            "del {O}.factor; {O}.factor = {i}",
        ),
        weight=5,
    ),
    Kind(
        "slots",
        ("{O}()",),
        _SLOTTED,
        numbers=("{p}.n",),
        tensors=("{p}.t",),
        reads=("{r} = {p}({a})",),
        writes=("{p}.n += 1", "{p}.t = {a}", "{p}.last = {a}", "{p}.t.add_(1)"),
        events=("{p}.n = {f}", "{p}.t = torch.full((4,), {f})", "{O}.__call__ = lambda self, v: v - self.n"),
        weight=2,
    ),
    Kind(
        "object with equality",
        ("{O}(2, torch.full((4,), {f}))", "{O}(2.0, torch.ones(4))", "{O}(3, torch.ones(4))"),
        _WITH_EQUALITY,
        numbers=("{p}.n",),
        tensors=("{p}.t",),
        writes=("{p}.n += 1", "{p}.t = {a}"),
        events=("{p}.n = {f}", "{p}.t = torch.full((4,), {f})", "{p}.t.mul_(2)"),
    ),
    Kind(
        "namespace",
        ("types.SimpleNamespace(n=2, t=torch.ones(4))", "argparse.Namespace(n=2.0, t=torch.full((4,), {f}))"),
        numbers=("{p}.n", "len(vars({p}))"),
        tensors=("{p}.t",),
        writes=("{p}.n += 1", "{p}.t = {a}", "{p}.last = {a}.detach()", "{p}.t.add_(1)"),
        events=(
            "{p}.n = {f}",
            "{p}.t = torch.full((4,), {f})",
            "{p}.m = 1",
            "{p}.t.mul_({f})",
            "{p}.n, {p}.t = 3, torch.zeros(4)",
        ),
        weight=3,
    ),
    Kind(
        "dataclass",
        ("{O}(n={f}, t=torch.ones(4))", "{O}(t=torch.ones(4))"),
        _DATACLASS,
        numbers=("{p}.n", "len({p}.tags)"),
        tensors=("{p}.t",),
        writes=("{p}.n += 1", "{p}.t = {a}", "{p}.tags.append(1)", "{p}.tags.append({a})"),
        events=("{p}.n = {f}", "{p}.t = torch.full((4,), {f})", "{p}.tags.append({i})", "{p}.t.mul_({f})"),
        weight=2,
    ),
    Kind(
        "frozen dataclass",
        ("{O}(n={f}, t=torch.ones(4))", "{O}(n=2, t=torch.full((4,), {f}))", "{O}(t=torch.ones(4))"),
        _FROZEN,
        numbers=("{p}.n",),
        tensors=("{p}.t",),
        writes=("object.__setattr__({p}, 'n', 3)",),
        events=(
            "object.__setattr__({p}, 'n', {f})",
            "{p}.t.mul_({f})",
            "object.__setattr__({p}, 't', torch.full((4,), {f}))",
        ),
    ),
    Kind(
        "namedtuple",
        ("{O}({f}, torch.ones(4))", "{O}(2, torch.ones(4))"),
        _NAMED,
        numbers=("{p}.n", "{p}[0]"),
        tensors=("{p}.t",),
        events=("{p}.t.mul_({f})",),
    ),
    Kind(
        "enum",
        ("{O}.COSINE", "{O}.SINE"),
        _ENUM,
        reads=("{r} = getattr(torch, {p}.value)({a})", "{r} = {a} * 2 if {p} is {O}.SINE else {a} + 1"),
        events=("{O}.SINE._value_ = 'tanh'",),
    ),
    Kind("int enum", ("{O}.ONE", "{O}.TWO", "2"), _INT_ENUM, numbers=("{p}",)),
    *(
        Kind(
            "own module",
            (),
            _OWN_MODULE.replace("{name}", name),
            numbers=("{p}.scale",),
            reads=("{r} = {p}.f({a})", "{r} = {p}.g({a})"),
            writes=("{p}.scale += 1", "{p}.items.append(1)", "{p}.last = {a}"),
            events=(
                "{p}.scale = {f}",
                "{p}.items.append({i})",
                "{p}.f = lambda v: v - 1",
                "{p}.f.__code__ = (lambda v: v + scale).__code__",
            ),
            weight=0.5,
        )
        for name in MODULE_NAMES
    ),
)

CALLABLE_KINDS = (
    Kind(
        "function",
        ("lambda v: v * {f}",),
        _FUNCTION,
        reads=("{r} = {p}({a})", "{r} = {p}({a}, 3)", "{r} = {p}({a}) * getattr({p}, 'extra', 1)"),
        writes=("{p}.extra = 2", "{p}.last = {a}"),
        events=(
            "{p}.__defaults__ = ({f},)",
            "{p}.__kwdefaults__ = {'shift': {f}}",
            "factor_{o} = {f}",
            "{p}.extra = {f}",
            "{p}.__code__ = (lambda v, power=2, *, shift=0.5: v - power * shift).__code__",
            "{p}.__kwdefaults__['shift'] = {f}",
        ),
        weight=2,
    ),
    Kind(
        "counting function",
        (),
        _COUNTING,
        reads=("{r} = {p}({a})",),
        numbers=("calls_{o}['n']",),
        events=("calls_{o}['n'] = {i}",),
    ),
    Kind(
        "closure",
        (),
        _CLOSURE,
        reads=("{r} = {p}[0]({a})", "{r} = {p}[0]({a})", "{r} = {p}[1]({a})"),
        events=("{p}[2]({f})", "{p}[2]({i})"),
        weight=2,
    ),
    Kind(
        "lru_cache",
        (),
        _CACHED,
        numbers=("{p}(2)", "{p}(3)"),
        writes=("{r} = {a} * {p}(1)",),
        reads=("{r} = {p}({a})",),
        events=("table_{o}['n'] = {f}", "table_{o}['n'] = {f}; {p}.cache_clear()"),
    ),
    Kind(
        "partial",
        ("functools.partial(base_{o}, {f})", "functools.partial(base_{o}, 2.0, shift={f})"),
        _PARTIAL,
        reads=("{r} = {p}({a})",),
        events=("{p}.keywords['shift'] = {f}",),
    ),
    Kind(
        "method",
        ("{o}_owner.wide", "{o}_owner.scaled"),
        _WITH_METHODS.replace("{o} = {O}()", "{o}_owner = {O}()\n{o} = {o}_owner.scaled"),
        reads=("{r} = {p}({a})",),
        writes=("{p}.__self__.n += 1",),
        events=("{o}_owner.n = {f}", "{O}.factor = {f}"),
    ),
    Kind(
        "list iterator",
        ("iter([1.0, 2.0, 3.0, 4.0])", "iter([5.0, 6.0])"),
        numbers=("next({p}, 0.5)",),
        events=("next({p}, None)",),
    ),
    Kind("generator", (), _GENERATOR, numbers=("next({p})",), events=("next({p})",)),
    Kind(
        "random.Random",
        ("random.Random({i})",),
        numbers=("{p}.random()", "{p}.randint(1, 3)"),
        events=("{p}.seed({i})",),
    ),
    Kind("numpy generator", ("numpy.random.default_rng({i})",), numbers=("float({p}.random())",)),
    Kind(
        "torch generator",
        ("torch.Generator().manual_seed({i})",),
        reads=("{r} = {a} + torch.rand(4, generator={p})",),
        events=("{p}.manual_seed({i})",),
    ),
)

RARE_KINDS = (
    Kind(
        "cached property",
        ("{O}()",),
        _CACHED_PROPERTY,
        numbers=("{p}.double", "{p}.n"),
        tensors=("{p}.table",),
        writes=("{p}.n += 1", "{p}.__dict__.pop('double', None)"),
        events=(
            "{p}.n = {i}",
            "{p}.__dict__.pop('double', None)",
            "{p}.double = {f}",
            "{p}.__dict__.clear(); {p}.n = 5",
        ),
    ),
    Kind(
        "descriptor",
        ("{O}()",),
        _DESCRIPTOR,
        numbers=("{p}.n",),
        events=(
            "vars({O})['n'].n = {f}",
            "{p}.__dict__['n'] = {i}",
            "Given{O}.__get__ = lambda self, owner, kind: {f}",
        ),
    ),
    Kind(
        "metaclass",
        (),
        _METACLASS,
        numbers=("{p}.factor", "len({p})", "{p}.n"),
        events=("Meta{O}.factor = {f}", "Meta{O}.__len__ = lambda cls: {i}", "{O}.n = {f}", "{O}.factor = {i}"),
    ),
    Kind(
        "queue",
        ("queue.SimpleQueue()", "queue.Queue()"),
        numbers=("{p}.qsize()",),
        writes=("{p}.put({a})", "{p}.put(1)"),
        events=("{p}.put({i})",),
    ),
    Kind(
        "memoryview",
        ("memoryview(bytearray(b'ab'))",),
        numbers=("{p}[0] % 5",),
        writes=("{p}[0] = 3",),
        events=("{p}[0] = {i}",),
    ),
    Kind(
        "count", ("itertools.count({i})", "itertools.cycle([1, 2, 3])"), numbers=("next({p})",), events=("next({p})",)
    ),
    Kind(
        "user list",
        ("collections.UserList([1, 2])",),
        numbers=("{p}[0]", "len({p})"),
        writes=("{p}.append({a})", "{p}.append(1)"),
        events=("{p}[0] = {f}", "{p}.append({i})"),
    ),
    Kind(
        "weak set",
        ("weakref.WeakSet()",),
        numbers=("len({p})",),
        writes=("{p}.add({a})",),
        events=("{p}.add(torch.nn.Linear)",),
    ),
    Kind(
        "weak dict",
        ("weakref.WeakKeyDictionary()",),
        numbers=("len({p})",),
        writes=("{p}[torch.nn.Linear] = {a}", "{p}[torch.nn.ReLU] = 1"),
        events=("{p}[torch.nn.Linear] = {i}",),
    ),
    Kind(
        "attrgetter",
        ("operator.attrgetter('shape')", "operator.attrgetter('data')"),
        reads=("{r} = {a} * len({p}({a}))",),
    ),
    Kind("flag", ("re.IGNORECASE", "re.IGNORECASE | re.MULTILINE"), numbers=("{p}.value",)),
    *(
        Kind(
            "autograd function",
            (),
            _OWN_FUNCTION.replace("{count}", count),
            numbers=("state_{o}['calls'] + 1",),
            reads=("{r} = {p}({a})", "{r} = {O}.apply({a})"),
            events=("state_{o}['n'] = {f}", "{O}.slope = {f}", "{O}.backward = staticmethod(lambda ctx, g: g * 7)"),
            weight=1.5,
        )
        for count in ("0", "1")
    ),
    *(
        Kind(
            "tensor subclass",
            ("torch.full((4,), {f}).as_subclass({O})",),
            define,
            tensors=("{p}",),
            reads=(
                "{r} = ({p} * {a}).as_subclass(torch.Tensor)",
                "{r} = {a} + {p}.mul(2).sum().as_subclass(torch.Tensor)",
            ),
            numbers=("{O}.gain",),
            writes=("{p}.add_(1)",),
            events=("{O}.gain = {f}", "{p}.mul_({f})", "{p}.tag = {f}"),
        )
        for define in (_SUBCLASS, _SCALED_BY_FUNCTION)
    ),
)

TENSOR_KINDS = (
    Kind(
        "tensor",
        _TENSORS,
        tensors=("{p}",),
        assigns=("{a}", "{a}.detach()", "{p} + 1", "{a}.mean()"),
        writes=(
            "{p}.add_(1)",
            "{p}.mul_({a}.detach().mean())",
            "{p}.data.add_(1)",
            "{p}.copy_(torch.ones(()))",
            "{p}.tag = 3.0",
            "{p}.seen = {a}",
        ),
        events=(
            "{p}.data.add_({f})",
            "{p}.detach().mul_({f})",
            "{p}.requires_grad_()",
            "{p}.detach_().requires_grad_(False)",
            "{p}.tag = {f}",
            "{p}.grad = torch.ones_like({p})",
            "{p}.grad = None",
            "{p}.data = torch.ones(4)",
            "{h} = {p}.register_hook(lambda g: g * 2)",
            "{p}.detach().zero_()",
        ),
        weight=5,
    ),
)

KINDS: tuple[Kind, ...] = (*PLAIN_KINDS, *CONTAINER_KINDS, *OBJECT_KINDS, *CALLABLE_KINDS, *RARE_KINDS, *TENSOR_KINDS)
