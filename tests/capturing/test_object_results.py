"""F-3, F-4: results that are objects come back as what the program returned: the same class, the same object."""

import collections
import dataclasses
import enum
import gc
import types
import weakref

import pytest
import torch

from foregrad.errors import UnknownOutputError
from helpers import grab, plain


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.made = "by the program"

    @property
    def twice(self):
        return self.loss * 2


class Slots:
    __slots__ = ("a", "b")


class Color(enum.Enum):
    RED = 1


class Table(collections.UserDict):
    pass


Point = collections.namedtuple("Point", "x y")


def build(x):
    out = Output(x * 2, [x, {"k": (x + 1,)}])
    out.extra = Point(x, "p")
    return out


def test_fields_extras_and_properties():
    compiled, _ = grab(build)
    x = plain(2)
    for _ in range(2):
        out, known = compiled(x), build(x)
        assert type(out) is Output and list(vars(out)) == list(vars(known)) and out.made == "by the program"
        assert out.hidden[0] is x and out.extra == Point(x, "p") and torch.equal(out.twice, known.twice)
    assert len(compiled.specializations) == 1 and compiled(x) is not out


def test_every_kind_of_object():
    def program(x):
        slots = Slots()
        slots.a = x * 2
        table = Table(k=x * 3)
        return (
            slots,
            table,
            types.SimpleNamespace(w=x),
            collections.defaultdict(list, k=[x]),
            collections.OrderedDict(b=x, a=1),
            collections.Counter("aab"),
            {3, 1},
        )

    compiled, _ = grab(program)
    for _ in range(2):
        slots, table, space, default, ordered, counter, numbers = compiled(plain(1))
        assert slots.a.item() == 2 and not hasattr(slots, "b") and table["k"].item() == 3 and type(table) is Table
        assert space.w.item() == 1 and default.default_factory is list and list(ordered) == ["b", "a"]
        assert counter["a"] == 2 and numbers == {1, 3}
        numbers.add(5)


def test_one_object_in_several_places_is_one():
    def program(x, given):
        inner = Output(x * 2)
        inner.me = weakref.ref(inner)
        items = [inner]
        given["kept"] = items
        return items, items, {"inner": inner}, given

    compiled, _ = grab(program)
    table = {}
    one, two, others, same = compiled(plain(1), table)
    assert one is two is table["kept"] and others["inner"] is one[0] and same is table and one[0].me() is one[0]


def test_one_tuple_in_several_places_is_one():
    """As in an output of Hugging Face, which has its fields as items and as attributes."""

    def in_two_places(x):
        layers = (x * 2, [x + 1])
        out = Output(x * 3, [layers, (layers,)])
        out.layers = layers
        return out, layers

    compiled, _ = grab(in_two_places)
    for _ in range(2):
        out, layers = compiled(plain(2))
        assert out.hidden[0] is out.hidden[1][0] is out.layers is layers
    assert len(compiled.specializations) == 1


def test_a_tuple_that_leads_to_itself():
    def around(x):
        around = ([x * 2],)
        around[0].append(around)
        return around

    compiled, _ = grab(around)
    found = compiled(plain(2))
    assert found[0][1][0] is found[0]


def test_an_object_that_leads_to_itself():
    def program(x):
        out = types.SimpleNamespace(w=x * 2)
        out.me, out.items = out, [out]
        return out

    out = grab(program)[0](plain(1))
    assert out.me is out and out.items[0] is out


CONFIG = types.SimpleNamespace(scale=2, names=["a"])
SIZES = [1, 2]


def test_what_exists_around_the_program_is_the_same_object():
    table = {"sizes": SIZES}
    compiled, _ = grab(lambda x: (x * CONFIG.scale, CONFIG, CONFIG.names, SIZES, table, Color.RED, Output, torch.relu))
    for _ in range(2):
        _, *found = compiled(plain(1))
        wanted = (CONFIG, CONFIG.names, SIZES, table, Color.RED, Output, torch.relu)
        assert all(a is b for a, b in zip(found, wanted, strict=True))
    assert len(compiled.specializations) == 1


def test_another_object_in_the_same_place_gets_another_program():
    table = {"items": [1]}
    compiled, _ = grab(lambda x: (x * 2, table["items"]))
    assert compiled(plain(1))[1] is table["items"]
    table["items"] = [1]
    assert compiled(plain(1))[1] is table["items"]


def test_what_was_given_is_the_same_object():
    compiled, _ = grab(lambda x, pair, items, config, names: (x * 2, pair, items, config, config.inner, names))
    for n in range(2):
        given = (x := plain(1), 2), [x, [3]], types.SimpleNamespace(n=1, inner=types.SimpleNamespace(m=2)), {"a"}
        _, *found, names = compiled(plain(1), *given)
        assert all(a is b for a, b in zip(found[:3], given, strict=False)), n
        assert found[3] is given[2].inner and names is given[3]
    assert len(compiled.specializations) == 1


def test_gradients_views_and_inputs_in_an_object():
    def program(x, box):
        return Output((box.w * x).sum(), [box.w, box.w[:1], x.detach()])

    compiled, _ = grab(program)
    for _ in range(2):
        w = plain(2).requires_grad_()
        x = plain(2)
        out = compiled(x, types.SimpleNamespace(w=w))
        out.loss.backward()
        assert w.grad.tolist() == [1, 2] and out.hidden[0] is w and out.hidden[1]._base is w
    assert len(compiled.specializations) == 1


class Plain:
    pass


class WithEnd:
    def __del__(self):
        pass


@pytest.mark.parametrize(
    "make", [lambda x: types.SimpleNamespace(f=lambda: x), lambda x: types.SimpleNamespace(f=map(abs, [x])), WithEnd]
)
def test_what_cannot_be_made_again_is_refused_by_name(make):
    compiled, _ = grab(lambda x: {"out": make(x) if make is not WithEnd else types.SimpleNamespace(f=WithEnd())})
    with pytest.raises(UnknownOutputError, match=r"at output\['out'\]\.f"):
        compiled(plain(1))


def test_results_and_what_they_hold_are_not_kept_alive():
    config = Plain()
    compiled, _ = grab(lambda x, box: (Output(x * box.w), box.config))
    box = Plain()
    box.w, box.config = plain(1), config
    out, same = compiled(plain(1), box)
    assert same is config
    alive = [weakref.ref(held) for held in (out, out.loss, box, config)]
    del out, same, box, config
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
