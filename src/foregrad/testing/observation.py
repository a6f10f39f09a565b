"""One call of one side, and all that a user can observe of it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from ..values import is_plain
from .cloning import Contents, has_storage, plain_parts
from .naming import Named, Tree, unfold
from .program import Arguments, Call, Side
from .scenarios import FORWARD_ONLY, Outlook, Scenario


@dataclass(frozen=True)
class TensorFacts:
    """What can be read off one tensor, with a copy of its elements.

    >>> TensorFacts.of(torch.ones(2, 3).t()).stride
    (1, 3)

    Args:
        kind: The name of its class.
        history: `leaf`, `non-leaf`, or `invalid` once autograd refuses to say.
        stride: None for a tensor without strides, such as a sparse one.
        offset: None likewise.
        bits: Which of `conj`, `neg` and `inference` are set.
        attributes: What the user, or the program, has put on it, in words.
        parts: Copies of the plain tensors that hold its elements.
    """

    kind: str
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int | None
    requires_grad: bool
    history: str
    bits: frozenset[str]
    attributes: Mapping[str, str]
    parts: tuple[Tensor, ...]

    @staticmethod
    def of(tensor: Tensor) -> "TensorFacts":
        """Read a tensor.

        >>> TensorFacts.of(torch.ones(2)).kind
        'Tensor'

        Args:
            tensor: Any tensor.
        """
        strided = has_storage(tensor)
        return TensorFacts(
            kind=type(tensor).__qualname__,
            dtype=tensor.dtype,
            device=tensor.device,
            layout=tensor.layout,
            shape=tuple(tensor.shape),
            stride=tensor.stride() if strided else None,
            offset=int(tensor.storage_offset()) if strided else None,
            requires_grad=tensor.requires_grad,
            history=_history(tensor),
            bits=frozenset(bit for bit in ("conj", "neg", "inference") if getattr(tensor, f"is_{bit}")()),
            attributes=_attributes(tensor),
            parts=tuple(_elements(part) for part in plain_parts(tensor)),
        )


def _history(tensor: Tensor) -> str:
    try:
        return "leaf" if tensor.is_leaf else "non-leaf"
    except RuntimeError:
        # One of several views was overwritten behind autograd's back.
        return "invalid"


def _attributes(tensor: Tensor) -> dict[str, str]:
    """What stands on a plain tensor; a subclass compares what it holds by its parts."""
    if type(tensor) not in (Tensor, Parameter):
        return {}
    return {name: _in_words(value) for name, value in vars(tensor).items() if not name.startswith("_dynamo_")}


def _in_words(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__qualname__} {value.detach().tolist()}"
    return repr(value) if is_plain(value) else type(value).__qualname__


def _elements(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    return plain.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Observation:
    """All that a user can observe of one call; what an error prevented is empty.

    >>> from foregrad.testing import FORWARD_ONLY, Program, observe
    >>> program = Program.of(torch.sin, (torch.zeros(2),), {})
    >>> seen = observe(program.side(lambda fn: fn), program.arguments, program.contents, FORWARD_ONLY)
    >>> list(seen.outputs)
    ['output']

    Args:
        forward_error: What the call raised.
        containers: The exact type and keys of each container in the output, and in the arguments after the call.
        values: The parts of these that are not tensors.
        outputs: The tensors in the output, and those that the call has put into arguments.
        held: The arguments and the state, after the call.
        versions: By how much each version counter grew, where there is one.
        identity: For each tensor and each container, the first one that is the same object.
        sharing: For each tensor, the first one in the same storage, and how many bytes behind it.
        random: The state of each random generator after forward and after backward.
        modes: Grad mode, autocast and the like after forward and after backward.
        backward_error: What backward raised.
        gradients: What arrived at each leaf, and what else the scenario shows.
        writing: Whether each output can be written to afterwards, and what autograd then says of it.
    """

    forward_error: Exception | None
    modes: Mapping[str, object]
    containers: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    outputs: Mapping[str, TensorFacts] = field(default_factory=dict)
    held: Mapping[str, TensorFacts] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    sharing: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    random: Mapping[str, Tensor] = field(default_factory=dict)
    backward_error: Exception | None = None
    gradients: Mapping[str, TensorFacts | None] = field(default_factory=dict)
    writing: Mapping[str, str] = field(default_factory=dict)

    @property
    def outputs_share_inputs(self) -> bool:
        """Whether an output is an argument, or looks at its memory: its tangent then reaches the argument by itself.

        >>> Observation(None, {}).outputs_share_inputs
        False
        """
        return any(where in self.outputs and first in self.held for where, (first, _) in self.sharing.items()) or any(
            where in self.held and first in self.outputs for where, (first, _) in self.sharing.items()
        )

    @property
    def outputs_are_row_major(self) -> bool:
        """Whether a contiguous tangent lies in memory as its output does.

        >>> Observation(None, {}).outputs_are_row_major
        True
        """
        able = [facts for facts in self.outputs.values() if facts.requires_grad]
        return all(facts.stride == torch.empty(facts.shape, device="meta").stride() for facts in able)

    @property
    def outlook(self) -> Outlook:
        """The outputs through which one can differentiate.

        >>> Observation(None, {}).outlook.differentiable
        ()
        """
        able = {where: facts for where, facts in self.outputs.items() if facts.requires_grad}
        return Outlook(tuple(able), any(facts.shape for facts in able.values()))


def observe(side: Side, arguments: Arguments, contents: Contents, scenario: Scenario, seed: int = 0) -> Observation:
    """Call one side on fresh arguments, then backward, and write down what a user can see.

    >>> from foregrad.testing import FORWARD_ONLY, Program
    >>> program = Program.of(torch.sin, (torch.zeros(2),), {})
    >>> seen = observe(program.side(lambda fn: fn), program.arguments, program.contents, FORWARD_ONLY)
    >>> seen.outputs["output"].shape
    (2,)

    Args:
        side: What to call.
        arguments: What to clone for it.
        contents: The bytes that arguments and state start with.
        scenario: What to ask of autograd afterwards.
        seed: Set before the call; also decides the tangents.
    """
    call = side.prepare(arguments, contents)
    before = side.state.tensors()
    versions = _versions([*call.tensors, *before])
    given = call.unfolded("before the call").objects
    _seed(seed)
    with _modes_kept():
        try:
            result = unfold(side.target(*call.args, **call.kwargs), "output")
        except Exception as error:
            return Observation(error, _modes("forward"))
        after = call.unfolded("after the call")
        output = _given_back(result, after, call)
        seen = _after_forward(side, call, before, versions, output)
        objects = {**given, **after.objects, **result.objects}
        placed = [*call.tensors, *after.tensors()]
        seen = replace(seen, identity={**seen.identity, **_identity(placed), **_identity(objects.items())})
    returned = output.tensors()
    with _modes_kept():
        try:
            leaves = [*call.leaves, *side.state.tensors()]
            shown = scenario.backward((tensor for _, tensor in returned), leaves, seed)
        except Exception as error:
            return replace(seen, backward_error=error, modes={**seen.modes, **_modes("backward")})
        arrived = [*call.leaves, *side.state.tensors(), *returned]
        seen = replace(
            seen,
            gradients={
                **_gradients(arrived),
                **{where: None if gradient is None else TensorFacts.of(gradient) for where, gradient in shown.items()},
            },
            modes={**seen.modes, **_modes("backward")},
            random={**seen.random, **_random("backward", call)},
        )
    _overwrite([*(leaf.grad for _, leaf in arrived if _history(leaf) == "leaf"), *shown.values()])
    return replace(seen, writing=_writing(returned)) if scenario is FORWARD_ONLY else seen


def _seed(seed: int) -> None:
    """Seed the generators of all devices: `manual_seed` keeps a traceback for each device that may come, for good."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _given_back(result: Tree, arguments: Tree, call: Call) -> Tree:
    """What a call gives to its caller: its result, and what it has put into the arguments."""
    known = {id(tensor) for _, tensor in call.tensors}
    new = {where: leaf for where, leaf in arguments.leaves.items() if id(leaf) not in known}
    return Tree({**result.containers, **arguments.containers}, {**result.leaves, **new})


def _writing(named: Iterable[Named]) -> dict[str, str]:
    """Write to each output, as a caller may, and say whether that was allowed and what becomes of its history.

    Every call must make its outputs anew: what is written here must not be there in the next.
    """
    outputs = {id(tensor): (where, tensor) for where, tensor in named if has_storage(tensor)}.values()
    seen: dict[str, str] = {}
    for where, tensor in outputs:
        try:
            tensor.fill_(3)
            seen[where] = "can be written"
        except RuntimeError:
            seen[where] = "cannot be written"
    return {where: f"{seen[where]}, then a {_history(tensor)}" for where, tensor in outputs}


def _overwrite(gradients: Iterable[Tensor | None]) -> None:
    """Write to gradients: they are the caller's own."""
    for gradient in gradients:
        fixed = gradient is None or gradient.is_inference() or gradient._is_zerotensor()
        if gradient is not None and not fixed and has_storage(gradient):
            gradient.detach().fill_(3)


def _after_forward(
    side: Side, call: Call, before: list[Named], versions: Mapping[str, int], output: Tree
) -> Observation:
    held = [*call.tensors, *side.state.tensors()]
    now = _versions([*call.tensors, *before])
    everything = [*held, *output.tensors(), *((f"{where} before the call", t) for where, t in before)]
    return Observation(
        forward_error=None,
        modes=_modes("forward"),
        random=_random("forward", call),
        containers=output.containers,
        values={where: leaf for where, leaf in output.leaves.items() if not isinstance(leaf, Tensor)},
        outputs={where: TensorFacts.of(tensor) for where, tensor in output.tensors()},
        held={where: TensorFacts.of(tensor) for where, tensor in held},
        versions={where: now[where] - version for where, version in versions.items()},
        identity=_identity(everything),
        sharing=_sharing(everything),
    )


def _versions(named: Iterable[Named]) -> dict[str, int]:
    return {where: tensor._version for where, tensor in named if not tensor.is_inference()}


def _identity(named: Iterable[tuple[str, object]]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {where: first.setdefault(id(value), where) for where, value in named}


def _sharing(named: Iterable[Named]) -> dict[str, tuple[str, int]]:
    first: dict[int, tuple[str, int]] = {}
    shared: dict[str, tuple[str, int]] = {}
    for where, tensor in named:
        for index, part in enumerate(plain_parts(tensor)):
            if not has_storage(part):
                continue
            name = where if part is tensor else f"inner tensor {index} of {where}"
            storage = part.untyped_storage()
            start = int(part.storage_offset()) * part.itemsize
            leader, leader_start = first.setdefault(storage.data_ptr() or storage._cdata, (name, start))
            shared[name] = leader, start - leader_start
    return shared


def _gradients(leaves: Iterable[Named]) -> dict[str, TensorFacts | None]:
    return {
        where: None if leaf.grad is None else TensorFacts.of(leaf.grad)
        for where, leaf in leaves
        if _history(leaf) == "leaf" or leaf.retains_grad
    }


def _random(when: str, call: Call) -> dict[str, Tensor]:
    states = {f"CPU generator after {when}": torch.get_rng_state()}
    for name, generator in call.generators:
        states[f"{name} after {when}"] = generator.get_state()
    for index in range(torch.cuda.device_count()):
        states[f"CUDA generator {index} after {when}"] = torch.cuda.get_rng_state(index)
    return states


def _autocast_devices() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def _modes(when: str) -> dict[str, object]:
    modes: dict[str, object] = {
        f"grad mode after {when}": torch.is_grad_enabled(),
        f"inference mode after {when}": torch.is_inference_mode_enabled(),
        f"default dtype after {when}": torch.get_default_dtype(),
        f"deterministic algorithms after {when}": torch.are_deterministic_algorithms_enabled(),
    }
    for device in _autocast_devices():
        state = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        modes[f"{device} autocast after {when}"] = state
    return modes


@contextmanager
def _modes_kept() -> Iterator[None]:
    """Undo what a program leaves behind in the global modes, which would leak into the next run."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _autocast_devices()}
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for device, (enabled, autocast_dtype) in autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, autocast_dtype)
