"""F-4: lists, dicts and objects that a program is given and changes: each call changes the caller's own."""

import collections
import dataclasses
import gc
import types
import weakref

import pytest
import torch

import foregrad
from foregrad.errors import DataDependentError, StateChangeError, UnsupportedError
from helpers import grab, nop, plain


class Box:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slots:
    __slots__ = ("__weakref__", "a", "b")


class SlotsAndMore(Slots):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: torch.Tensor
    n: int = 1


Point = collections.namedtuple("Point", "x y")


class Named(Point):
    """A named tuple with attributes."""


class Items(list):
    pass


class Table(dict):
    def __setitem__(self, key, value):
        raise AssertionError("code of the user's runs")


class Guarded:
    """Objects of which none of the code that Python calls by itself may run."""

    def __init__(self):
        raise AssertionError("__init__ runs")

    def __setattr__(self, name, value):
        raise AssertionError("__setattr__ runs")

    def __getattribute__(self, name):
        if name == "__dict__":
            raise AssertionError("__getattribute__ runs")
        return object.__getattribute__(self, name)


class Cache:
    """As libraries have them: it grows in place, and begins empty."""

    def __init__(self):
        self.layers, self.ready = [], False

    def update(self, i, keys):
        if not self.ready:
            self.ready = True
        if len(self.layers) == i:
            self.layers.append(types.SimpleNamespace(keys=keys, of=weakref.ref(self)))
        else:
            self.layers[i].keys = torch.cat([self.layers[i].keys, keys])
        return self.layers[i].keys


def programs(compiled):
    return len(compiled.specializations)


def test_attributes_lists_and_dicts_of_an_object():
    def program(x, box):
        box.w = box.w + x
        box.n += 1
        box.log.append(x * 2)
        box.table["k"] = x * 3
        del box.gone
        return box.w * 2

    def given():
        return Box(w=plain(2), n=1, log=[], table={}, gone=1)

    compiled, _ = grab(program)
    for _ in range(2):
        one, two = given(), given()
        log = two.log
        assert torch.equal(compiled(plain(2), two), program(plain(2), one))
        assert list(vars(one)) == list(vars(two)) and two.n == 2 and two.log is log
        assert torch.equal(two.w, one.w) and torch.equal(log[0], one.log[0])
        assert torch.equal(two.table["k"], one.table["k"])
    assert programs(compiled) == 1
    compiled(plain(2), Box(w=plain(2), n=2, log=[], table={}, gone=1))
    assert programs(compiled) == 2


def test_plain_lists_and_dicts():
    def program(x, items, table):
        items.insert(0, x * 2)
        items.pop()
        table["b"] = table.pop("a")
        table["c"] = [x]
        return len(items)

    compiled, _ = grab(program)
    items, table, x = [1, 2], {"a": 5, "z": 6}, plain(1)
    assert compiled(x, items, table) == 2
    assert items[0].item() == 2 and items[1] == 1 and list(table) == ["z", "b", "c"] and table["c"][0] is x


def test_a_cache_that_grows_and_comes_back():
    def program(x, cache):
        return cache.update(0, x * 2).sum() + cache.update(1, x * 3).sum(), cache

    compiled, _ = grab(program)
    ours, theirs = Cache(), Cache()
    for step in range(3):
        w, v = (plain(2).requires_grad_() for _ in range(2))
        (a, same), (b, _) = compiled(w, ours), program(v, theirs)
        assert same is ours and torch.equal(a, b) and programs(compiled) == step + 1
        a.backward(retain_graph=True)
        b.backward(retain_graph=True)
        assert torch.equal(w.grad, v.grad)
        assert ours.layers[1].of() is ours and ours.ready is True
    assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)


def test_sizes_and_numbers_that_grow_need_one_program():
    def program(x, cache):
        cache.n += 1
        cache.keys = torch.cat([cache.keys, x * cache.n])
        return cache.keys.sum()

    compiled = foregrad.aot_function(program, nop, dynamic=True)
    ours, theirs = (Box(n=5, keys=plain(4)) for _ in range(2))
    for _ in range(6):
        assert torch.equal(compiled(plain(2), ours), program(plain(2), theirs))
    assert ours.n == 11 and torch.equal(ours.keys, theirs.keys) and programs(compiled) == 1


def test_slots():
    def program(x, s):
        s.b, s.c = s.a * x, 1
        del s.a
        return s

    compiled, _ = grab(program)
    for _ in range(2):
        s = SlotsAndMore()
        s.a = plain(2)
        assert compiled(plain(2), s) is s and s.b.tolist() == [1, 4] and s.c == 1 and not hasattr(s, "a")
    assert programs(compiled) == 1


def test_subclasses_of_containers():
    def program(x, items, table, point, ordered, default):
        items.append(x * 2)
        items.note = x
        dict.__setitem__(table, "k", x * 3)
        table.note = "n"
        point.note = point.x * x
        ordered.move_to_end("a")
        default["new"].append(x)
        return items, table, point, ordered, default

    given = (
        Items([plain(1)]),
        Table(a=plain(1)),
        Named(plain(1), 2),
        collections.OrderedDict(a=plain(1), b=1),
        collections.defaultdict(list, a=[plain(1)]),
    )
    compiled, _ = grab(program)
    result = compiled(plain(1), *given)
    assert all(a is b for a, b in zip(result, given, strict=True))
    items, table, point, ordered, default = given
    assert items[1].item() == 2 and items.note.item() == 1 and table["k"].item() == 3 and table.note == "n"
    assert point.note.item() == 1 and list(ordered) == ["b", "a"] and default["new"][0].item() == 1


def test_no_code_of_an_object_runs_and_what_is_frozen_can_be_read():
    box = object.__new__(Guarded)
    object.__getattribute__(box, "__dict__").update(w=plain(2))
    compiled, _ = grab(lambda x, box, frozen: (box.w * x * frozen.w, box, frozen))
    for _ in range(2):
        frozen = Frozen(plain(2))
        out, *same = compiled(plain(2), box, frozen)
        assert out.tolist() == [1, 8] and same[0] is box and same[1] is frozen
    assert programs(compiled) == 1


def test_what_is_the_same_object_is_changed_once():
    def program(x, a, b):
        a.append(x)
        return len(b)

    compiled, _ = grab(program)
    one = []
    assert compiled(plain(1), [], []) == 0
    assert compiled(plain(1), one, one) == 1 and len(one) == 1
    assert compiled(plain(1), [], []) == 0 and programs(compiled) == 2


def test_objects_that_lead_to_themselves():
    box, items = Box(w=plain(2)), [plain(2)]
    box.me = box
    items.append(items)
    compiled, _ = grab(lambda x, box, items: (box.me.me.w * x + items[1][1][0], box, items))
    out, one, other = compiled(plain(2), box, items)
    assert out.tolist() == [2, 6] and one is box and other is items


def test_the_object_that_a_method_is_bound_to():
    class Steps:
        def __init__(self):
            self.count, self.seen = 0, []

        def step(self, x):
            self.count += 1
            self.seen.append(x * self.count)
            return x * self.count

    compiled, _ = grab(Steps.step)
    steps = Steps()
    for n in (1, 2, 3):
        assert compiled(steps, plain(1)).item() == n and steps.count == n and len(steps.seen) == n


def test_a_module_in_an_object():
    def program(x, box):
        box.h = box.net(x)
        return box.h.sum()

    compiled, _ = grab(program)
    for _ in range(2):
        net = torch.nn.Linear(2, 2)
        box = Box(net=net)
        compiled(plain(1, 2), box).backward()
        assert torch.equal(box.h, net(plain(1, 2))) and net.bias.grad.tolist() == [1, 1]
    assert programs(compiled) == 1


def test_a_write_to_a_tensor_in_an_object_and_a_view_of_it():
    def program(x, box):
        box.w.add_(x)
        box.v = box.w[:1]
        return box.w

    compiled, _ = grab(program)
    box = Box(w=plain(2))
    assert compiled(plain(2), box) is box.w and box.w.tolist() == [2, 4] and box.v._base is box.w


@pytest.mark.usefixtures("reads_refused")
def test_a_refused_call_changes_nothing():
    def program(x, box):
        box.n, box.w = 5, x
        box.items.append(x)
        return x.sum().item() if box.reads else box.fails()

    compiled, _ = grab(program)
    for reads, error in ((True, DataDependentError), (False, AttributeError)):
        w = plain(1)
        box = Box(n=1, w=w, items=[], reads=reads)
        with pytest.raises(error):
            compiled(plain(1), box)
        assert box.n == 1 and box.w is w and box.items == []


DEFAULT = Box(w=torch.ones(1), n=1)


def test_an_object_that_the_program_also_finds_by_itself():
    compiled, _ = grab(lambda x, box: x * box.w * (2 if box is DEFAULT else 3))
    assert compiled(plain(1), DEFAULT).item() == 2
    assert compiled(plain(1), Box(w=torch.ones(1), n=1)).item() == 3
    assert compiled(plain(1), DEFAULT).item() == 2


def test_a_list_that_the_program_also_finds_by_itself_is_not_changed():
    found = []
    compiled, _ = grab(lambda x, given: (given.append(x), x * len(found))[1])
    with pytest.raises(StateChangeError, match=r"args\[1\], which it also finds by itself"):
        compiled(plain(1), found)
    assert found == []
    assert compiled(plain(1), []).item() == 0


def test_changes_that_cannot_be_made_again_are_refused_by_name():
    def to_another_class(x, box):
        box.inner.__class__ = Frozen
        return x

    box, entries = Box(inner=Box(w=plain(1))), collections.deque([1])
    with pytest.raises(StateChangeError, match=r"the class of args\[1\]\.inner"):
        grab(to_another_class)[0](plain(1), box)
    with pytest.raises(StateChangeError, match=r"args\[1\]\.entries, a deque"):
        grab(lambda x, box: (box.entries.append(x), x)[1])[0](plain(1), Box(w=plain(1), entries=entries))
    names = {5}
    with pytest.raises(StateChangeError, match=r"kwargs\['box'\]\.names, a set"):
        grab(lambda x, box: (box.names.add(len(box.names)), x)[1])[0](plain(1), box=Box(w=plain(1), names=names))
    assert type(box.inner) is Box and [*entries] == [1] and names == {5}


def test_a_change_in_the_backward_is_refused():
    def program(x, box):
        y = x * 2
        y.register_hook(lambda gradient: setattr(box, "n", 2))
        return y.sum()

    box = Box(n=1, w=plain(1))
    with pytest.raises(StateChangeError, match=r"args\[1\] in its backward"):
        grab(program)[0](plain(2).requires_grad_(), box)
    assert box.n == 1


def test_nothing_is_kept_alive():
    def program(x, box):
        box.items.append(Box(w=x * 2))
        return box.items[0], box

    compiled, _ = grab(program)
    box = Box(w=plain(1), items=[])
    result, _ = compiled(plain(1).requires_grad_(), box)
    alive = [weakref.ref(held) for held in (box, box.w, result, result.w)]
    del box, result, _
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


class Node:
    def __init__(self, w):
        self.w = w


def test_objects_that_are_keys_are_the_callers_own():
    compiled, _ = grab(lambda x, table, node: x * table[node] * node.w)
    for scale in (2, 3):
        node = Node(plain(1) * scale)
        assert compiled(plain(1), {node: plain(1)}, node).item() == scale
    assert programs(compiled) == 1


def test_an_object_with_an_optimizer():
    """Whose state is a dict of tensors: it stays as it is, and what holds it is taken apart."""

    class Trainer:
        def __init__(self):
            torch.manual_seed(0)
            self.net, self.losses = torch.nn.Linear(2, 2), []
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)

        def loss(self, x):
            loss = self.net(x).pow(2).sum()
            self.losses.append(loss.detach())
            return loss

    def train(trainer, loss):
        for _ in range(3):
            trainer.optimizer.zero_grad()
            loss(trainer, plain(2)).backward()
            trainer.optimizer.step()
        return [*trainer.losses, *trainer.net.parameters()]

    compiled, _ = grab(Trainer.loss)
    for one, other in zip(train(Trainer(), Trainer.loss), train(Trainer(), compiled), strict=True):
        assert torch.equal(one, other)


def test_objects_that_lead_to_others_too_many_times_are_refused():
    box = Box(w=plain(1))
    for _ in range(5000):
        box = Box(inner=box)
    with pytest.raises(UnsupportedError, match="so many times in a row"):
        grab(lambda x, box: x * 2)[0](plain(1), box)


def test_the_reason_for_another_program_names_the_place_in_an_object():
    def program(x, box, other):
        box.inner.n += 1
        return x * box.inner.n

    compiled, _ = grab(program)
    first = Box(inner=Box(n=1), w=plain(1))
    for box, other in ((first, Box()), (first, Box()), (one := Box(inner=Box(n=1), w=plain(1)), one)):
        compiled(plain(1), box, other)
    reasons = [str(reason) for reason in compiled.recompiles]
    assert "args[1].inner.n was 1, is 2" in reasons[0] and "args[2]" in reasons[1] and "output" not in reasons[1]
