"""A forward in parts: between two of them data is read, and compared with what was read while recording.

The parts are what compilers get. What the rest of the run time sees is one forward, which takes and returns what the
whole graph does, and raises `Missed` if a read gives something else: by then nothing was written.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, condition_on_symbols, conditions_on_symbols, identity_of
from ..codegen.writer import Writer, literal
from ..errors import PartitionError
from ..functionalize.operators import default_generator
from ..graph.graph import Graph, GraphOutput, Node, get_constant, nodes_in
from ..graph.host_part import decided_by_reads
from ..graph.reads import START, Read, Reseed, sizes_of
from ..host_numbers import decided
from ..ops import draws
from ..slots import Token, Value
from ..values import same_value
from .compilers import Boxed, CompilerInput, for_compiler


class Missed(Exception):
    """A read gave another value than while the program was recorded: the call is for another program."""

    def __init__(self, read: Read, value: Any) -> None:
        super().__init__(str(read))
        self.read, self.value = read, value


@dataclass(slots=True)
class Part:
    """What runs before a read, or after the last one."""

    nodes: list[Node] = field(default_factory=list)
    read: Node | None = None  # after it
    unpacked: list[Node] = field(default_factory=list)  # single results of the read
    decides: list[Node] = field(default_factory=list)  # by numbers that were read, and what that follows from
    takes: list[Node] = field(default_factory=list)
    gives: list[Node] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether there is anything to run."""
        return bool(self.gives) or any(node.impure for node in self.nodes)


def require_all_reads(joint: Graph, forward: Graph) -> None:
    """A partitioner of the user's must keep the reads: what follows them depends on their values."""
    wanted = [node.read for node in joint.nodes if node.read is not None]
    found = {node.read for node in forward.nodes if node.read is not None}
    for read in wanted:
        if read not in found:
            raise PartitionError(
                f"The partitioner left a read out of the forward ({read}). It must keep nodes that are marked impure."
            )


def cut_at_reads(graph: Graph) -> list[Part]:
    """The parts of a forward, in order, each with what it takes of the inputs and of earlier parts."""
    reads = sorted((node for node in graph.nodes if node.read is not None), key=lambda node: node.part)
    places = [node.part for node in reads]
    after = decided_by_reads(graph.nodes)
    parts = [Part(read=node) for node in reads] + [Part()]
    for node in graph.nodes:
        if _is_result_of_read(node):
            parts[_place(node.args[0].part, places)].unpacked.append(node)
        elif node in after:
            parts[_place(after[node].part, places)].decides.append(node)
        elif node.read is None and node.op is not get_constant:
            parts[_place(node.part, places)].nodes.append(node)
    needed = {node for node in nodes_in(graph.results) if node.op is not get_constant}
    for part in reversed(parts):
        wanted = needed if part.read is None else needed.union(part.read.inputs(), *_read_by(part.decides))
        own = set(part.nodes)
        part.gives = [node for node in part.nodes if node in wanted]
        inputs = dict.fromkeys(item for node in part.nodes for item in node.inputs())
        part.takes = [item for item in inputs if item not in own and item.op is not get_constant]
        part.nodes[:0] = [item for item in inputs if item.op is get_constant]
        needed = wanted.union(part.takes)
    return parts


def _is_result_of_read(node: Node) -> bool:
    return node.op is operator.getitem and isinstance(node.args[0], Node) and node.args[0].read is not None


def _place(number: int, places: Sequence[int]) -> int:
    """The part of a node before which so many reads were recorded, some of which are none any more."""
    return bisect.bisect_left(places, number)


def _read_by(nodes: Sequence[Node]) -> list[tuple[Node, ...]]:
    return [node.inputs() for node in nodes]


@dataclass(frozen=True)
class CompiledParts:
    """The compiled parts of a forward."""

    modules: tuple[Any, ...]  # graph modules, as the compiler was given them
    strides: list[Any] | None  # of what the forward returns, if the compiler reported any


Conditions = Mapping[int, tuple[str, tuple[str, ...]]]
"""By the numbers of reads: what the recording assumed about the symbols of that read and those before, as text."""


def conditions_of(shape_env: Any, reads: Sequence[Read]) -> Conditions:
    """The conditions of a recording, each at the last read that it mentions."""
    owners = {symbol: read.number for read in reads for symbol, _ in read.symbols}
    texts: dict[int, list[str]] = {}
    names: dict[int, set[str]] = {}
    for text, symbols in conditions_on_symbols(shape_env):
        last = max(owners[symbol] for symbol in symbols)
        texts.setdefault(last, []).append(f"({text})")
        names.setdefault(last, set()).update(symbols)
    return {number: (" and ".join(texts[number]), tuple(sorted(names[number]))) for number in texts}


def write_parts(
    graph: Graph,
    conditions: Conditions,
    writer: Writer,
    name: str,
    compile_part: Callable[[CompilerInput, Sequence[Any], Callable[[Boxed], None]], list[Any] | None],
) -> CompiledParts:
    """Compile the parts of a forward, and write the function `name` that runs them.

    `compile_part` compiles a graph that takes inputs of these strides, hands the result to what puts it in its place,
    and gives the strides of what it returns, where they are reported.
    """
    parts = cut_at_reads(graph)
    modules: list[Any] = []
    strides: dict[Node, Any] = {}
    calls: list[str | None] = []
    for part in parts:
        if not part.runs:
            calls.append(None)
            continue
        calls.append(writer.fresh(f"part_{len(modules)}"))
        outputs = [GraphOutput(Value(node.name), node) for node in part.gives]
        overwritten = graph.overwritten & {*part.takes, *part.nodes}
        given = for_compiler(Graph(part.takes, part.nodes, outputs, overwritten))
        modules.append(given.module)
        install = _Install(writer, calls[-1] or "")
        reported = compile_part(given, [strides.get(node) for node in part.takes], install)
        strides |= dict(zip(part.gives, reported, strict=True)) if reported else {}
    _write(graph, conditions, writer, name, parts, calls)
    known = [strides.get(value) if isinstance(value, Node) else None for value in graph.results]
    return CompiledParts(tuple(modules), known if strides else None)


@dataclass(frozen=True)
class _Install:
    """Puts a compiled part in its place."""

    writer: Writer
    name: str

    def __call__(self, compiled: Boxed) -> None:
        self.writer.rebind(self.name, compiled)


def _names(graph: Graph, writer: Writer, parts: Sequence[Part]) -> dict[Node, str]:
    """Variables of the function that runs the parts."""
    for own in ("args", "graph_inputs"):
        writer.fresh(own)
    shown = [*graph.inputs, *(node for part in parts for node in (*part.gives, *part.unpacked, *part.decides))]
    shown += [part.read for part in parts if part.read is not None]
    names = {node: writer.fresh(node.name) for node in shown}
    read = [node for part in parts if part.read is not None for node in part.read.inputs()]
    constants = [n for n in (*nodes_in(graph.results), *read) if n.op is get_constant]
    return names | {node: writer.bind(node.args[0], "constant") for node in constants}


def _write_what_follows(
    writer: Writer, part: Part, names: Mapping[Node, str], conditions: Conditions, back_to: dict[Any, str]
) -> None:
    """The read after a part, what is taken out of it, and what was decided by it."""
    if part.read is not None and isinstance(part.read.read, Reseed):
        _write_reseed(writer, part.read.read, back_to)
    elif part.read is not None:
        _write_read(writer, part.read, names, conditions)
    for node in part.unpacked:
        writer.line(f"{names[node]} = {names[node.args[0]]}[{node.args[1]}]")
    if part.read is not None and part.decides:
        _write_decisions(writer, part.read, part.decides, names)


def _write(
    graph: Graph,
    conditions: Conditions,
    writer: Writer,
    name: str,
    parts: Sequence[Part],
    calls: Sequence[str | None],
) -> None:
    """The function that runs the parts; values are dropped after their last use."""
    names = _names(graph, writer, parts)
    tokens = graph.inputs_of(Token)
    with writer.block(f"def {name}(args):"):
        taken = [names[node] for node in graph.inputs if node not in tokens]
        if taken:
            writer.take_apart(taken, "args")
        writer.line("args.clear()")
        for node in tokens:
            writer.line(f"{names[node]} = None")
        back_to = _states_needed(writer, [part.read.read for part in parts if part.read is not None])
        for part, call, dropped in zip(parts, calls, _last_uses(graph, parts), strict=True):
            if call is not None:
                _write_call(writer, part, call, dropped, names)
            _write_what_follows(writer, part, names, conditions, back_to)
        results = graph.results[len(tokens) :]
        texts = [names[value] if isinstance(value, Node) else literal(writer, value) for value in results]
        writer.line(f"return [{', '.join(texts)}]")
    writer.line()


def _write_call(writer: Writer, part: Part, call: str, dropped: Sequence[Node], names: Mapping[Node, str]) -> None:
    writer.line(f"graph_inputs = [{', '.join(names[node] for node in part.takes)}]")
    if dropped:
        writer.line(f"del {', '.join(names[node] for node in dropped)}")
    if part.gives:
        writer.take_apart([names[node] for node in part.gives], f"{call}(graph_inputs)")
    else:
        writer.line(f"{call}(graph_inputs)")


def _write_read(writer: Writer, node: Node, names: Mapping[Node, str], conditions: Conditions) -> None:
    """Read, and compare."""
    read = node.read
    assert isinstance(read, Read)
    known, look = writer.bind(read, f"read_{read.number}"), writer.bind(read.look, "look")
    raises = f"raise {writer.bind(Missed, 'Missed')}({known}"
    writer.line(f"# {read}")
    if read.sized:
        arguments = [_text(writer, item, names) for item in node.args]
        arguments += [f"{key}={_text(writer, item, names)}" for key, item in node.kwargs.items()]
        writer.line(f"{names[node]} = {look}({', '.join(arguments)})")
        if read.symbols:
            _write_symbols(writer, read, names[node], conditions)
            return
        sizes = f"{writer.bind(sizes_of, 'sizes_of')}({names[node]})"
        writer.line(f"if {sizes} != {read.value}: {raises}, {sizes})")
        return
    value = names[node]
    writer.line(f"{value} = {look}({', '.join(names[item] for item in node.inputs())})")
    if read.is_number:
        return
    if read.symbols:
        _write_symbols(writer, read, value, conditions)
        return
    if type(read.value) is bool:
        differs = f"{value} is not {read.value}"
    elif type(read.value) is int:
        differs = f"{value} != {read.value}"
    else:
        differs = f"not {writer.bind(same_value, 'same_value')}({value}, {known}.value)"
    writer.line(f"if {differs}: {raises}, {value})")


def _states_needed(writer: Writer, reads: Sequence[Read | Reseed | None]) -> dict[Any, str]:
    """Names for states that generators are put back to, by the numbers of reseedings; of starts, by generators."""
    names: dict[Any, str] = {}
    for reseed in reads:
        if isinstance(reseed, Reseed) and (key := _key_of_state(reseed)) is not None and key not in names:
            names[key] = writer.fresh("state")
            if reseed.to == START:
                writer.line(f"{names[key]} = {writer.bind(reseed.generator, 'generator')}.get_state()")
    return names


def _key_of_state(reseed: Reseed) -> Any:
    if isinstance(reseed.to, Tensor):
        return None
    return ("start", identity_of(reseed.generator)) if reseed.to == START else reseed.to


def _write_reseed(writer: Writer, reseed: Reseed, back_to: Mapping[Any, str]) -> None:
    """Put a generator elsewhere; where it was before is kept if it comes back there."""
    generator = writer.bind(reseed.generator, "generator")
    writer.line(f"# {reseed}")
    if reseed.number in back_to:
        writer.line(f"{back_to[reseed.number]} = {generator}.get_state()")
    if isinstance(reseed.to, Tensor):
        writer.line(f"{generator}.set_state({writer.bind(reseed.to, 'seeded')})")
    else:
        writer.line(f"{generator}.set_state({back_to[_key_of_state(reseed)]})")


def _write_decisions(writer: Writer, after: Node, nodes: Sequence[Node], names: Mapping[Node, str]) -> None:
    """What follows from a number that was read, and what was decided by that."""
    assert isinstance(after.read, Read)
    for node in nodes:
        given = [_text(writer, item, names) for item in node.args]
        if node.op is decided:
            known, missed = writer.bind(after.read, f"read_{after.read.number}"), writer.bind(Missed, "Missed")
            writer.line(f"if {given[0]} is not {given[1]}: raise {missed}({known}, {names[after]})")
        else:
            assert node.op is not None
            op = writer.bind(node.op, getattr(node.op, "__name__", "op"))
            writer.line(f"{names[node]} = {op}({', '.join(given)})")


def _write_symbols(writer: Writer, read: Read, value: str, conditions: Conditions) -> None:
    """Name the symbols of a read, and compare what was assumed about them."""
    for symbol, found in read.symbols:
        writer.line(f"{writer.variables.setdefault(('symbol', symbol), writer.fresh(symbol))} = {value}{found}")
    if read.number in conditions:
        text, symbols = conditions[read.number]
        given = ", ".join(writer.variables["symbol", symbol] for symbol in symbols)
        holds = writer.bind(condition_on_symbols(text, symbols), "sizes_fit")
        missed, known = writer.bind(Missed, "Missed"), writer.bind(read, f"read_{read.number}")
        seen = f"{writer.bind(sizes_of, 'sizes_of')}({value})" if read.sized else value
        writer.line(f"if not {holds}({given}): raise {missed}({known}, {seen})  # {text}")


def _text(writer: Writer, value: Any, names: Mapping[Node, str]) -> str:
    """An argument of a read."""
    if isinstance(value, Node):
        return names[value]
    if type(value) in (list, tuple):
        return f"[{', '.join(_text(writer, item, names) for item in value)}]"
    return literal(writer, value)


def _last_uses(graph: Graph, parts: Sequence[Part]) -> list[list[Node]]:
    """For each part, the values that nothing reads after it has started."""
    needed = set(nodes_in(graph.results))
    found: list[list[Node]] = []
    for part in reversed(parts):
        read = () if part.read is None else (*part.read.inputs(), *nodes_in(map(list, _read_by(part.decides))))
        needed |= set(read)
        found.append([node for node in part.takes if node not in needed] if part.runs else [])
        needed |= set(part.takes)
    found.reverse()
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Generators that a call has drawn from, before it finds that it is for another program.
def generators_before(graph: Graph) -> list[torch.Generator]:
    """The generators that a forward draws from before its last read."""
    last = max(node.part for node in graph.nodes if node.read is not None)
    found: dict[torch.Generator, None] = {}
    for node in graph.nodes:
        if isinstance(node.read, Reseed):
            found[node.read.generator] = None
        if node.part <= last and isinstance(node.op, OpOverload) and draws(node.op, node.args, node.kwargs):
            given = [item.args[0] for item in node.inputs() if item.op is get_constant]
            own = [item for item in given if isinstance(item, torch.Generator)]
            found.update(dict.fromkeys(own or [default_generator(_device_of(node))]))
    return list(found)


def _device_of(node: Node) -> torch.device:
    values = [node.value, *(item.value for item in node.inputs())]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


@dataclass(frozen=True)
class States:
    """Notes where generators are, and puts them back."""

    generators: tuple[torch.Generator, ...]

    def note(self) -> list[torch.Tensor]:
        """Where they are now."""
        return [generator.get_state() for generator in self.generators]

    def restore(self, states: list[torch.Tensor]) -> None:
        """Put them back."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
