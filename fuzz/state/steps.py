"""Whole training steps: forward, loss, backward, clipping, optimizer, schedule, and what happens to them between steps.

A step is a stateful program whose statements have an order, and that is called several times. Models, optimizers,
schedules and scalers are drawn, and so is what compiles the step.
"""

from dataclasses import replace

from .generate import Object, ProgramGenerator, drawing_world, drawn
from .kinds import Kind
from .program import Part, StateProgram
from .world import World

_CALLS = (3, 4, 4, 5)
_FORMS = {"function": 5, "argument": 2, "closure": 2, "method": 1}
_FAMILY = "rows"
_MORE_STATEMENTS = 0.25
_LOSS = "n0"

_MODELS = (
    "torch.nn.Linear(4, 4)",
    "torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))",
    "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.LayerNorm(4))",
    "torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4))",
    "torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))",
    "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.PReLU(), torch.nn.Linear(4, 4).requires_grad_(False))",
    "torch.nn.Sequential(*[torch.nn.Linear(4, 4)] * 2)",
    "torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))",
    "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GroupNorm(2, 4), torch.nn.GELU()).double().float()",
)

_PARAMETERS = (
    *("{m}.parameters()",) * 4,
    "[{'params': [*{m}.parameters()][:1]}, {'params': [*{m}.parameters()][1:], 'lr': 0.5}]",
    "[{'params': [*{m}.parameters()][::-1], 'weight_decay': 0.1}]",
    "[q for q in {m}.parameters() if q.dim() > 1]",
    "{m}.named_parameters()",
)

_RATES = ("lr=0.1", "lr=0.1", "lr=0.01", "lr=torch.tensor(0.1)")
_MANNERS = ("", "", "", ", foreach=True", ", foreach=False")
_FUSED = (*_MANNERS, ", fused=True")
_DECAY = ("", "", ", weight_decay=0.1", ", maximize=True")

# For each class: its options, one of each tuple.
_OPTIMIZERS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("SGD", (("", ", momentum=0.9", ", momentum=0.9, nesterov=True", ", momentum=0.5, dampening=0.1"), _DECAY, _FUSED)),
    ("Adam", (("", ", amsgrad=True", ", betas=(0.5, 0.9)", ", eps=0.1"), _DECAY, _FUSED)),
    ("AdamW", (("", ", amsgrad=True", ", betas=(0.5, 0.9)", ", eps=0.1"), _DECAY, _FUSED)),
    ("Adagrad", (("", ", lr_decay=0.5", ", initial_accumulator_value=0.5"), _DECAY, _FUSED)),
    ("Adadelta", (("", ", rho=0.5"), _DECAY, _MANNERS)),
    ("RMSprop", (("", ", centered=True", ", momentum=0.5"), _DECAY, _MANNERS)),
    ("Adamax", (("",), _DECAY, _MANNERS)),
    ("NAdam", (("", ", decoupled_weight_decay=True", ", momentum_decay=0.1"), _DECAY, _MANNERS)),
    ("RAdam", (("", ", decoupled_weight_decay=True"), _DECAY, _MANNERS)),
    ("Rprop", (("", ", etas=(0.4, 1.3)"), ("", ", maximize=True"), _MANNERS)),
    ("ASGD", (("", ", t0=2", ", lambd=0.1"), _DECAY, _MANNERS)),
    ("Adafactor", (("", ", eps=(None, 0.01)", ", d=0.5"), _DECAY, _MANNERS)),
)

_SCHEDULES = (
    "StepLR({o}, 1)",
    "MultiStepLR({o}, [1, 3])",
    "ExponentialLR({o}, 0.5)",
    "CosineAnnealingLR({o}, 3)",
    "CosineAnnealingWarmRestarts({o}, 2)",
    "LambdaLR({o}, lambda epoch: 0.5**epoch)",
    "MultiplicativeLR({o}, lambda epoch: 0.5)",
    "OneCycleLR({o}, 0.5, total_steps=9, cycle_momentum=False)",
    "LinearLR({o}, total_iters=2)",
    "ConstantLR({o}, total_iters=2)",
    "PolynomialLR({o}, total_iters=3)",
    "CyclicLR({o}, 0.1, 0.5, 2, cycle_momentum=False)",
    "SequentialLR({o}, [{in}.ConstantLR({o}), {in}.ExponentialLR({o}, 0.5)], [2])",
    "ChainedScheduler([{in}.ConstantLR({o}), {in}.ExponentialLR({o}, 0.5)])",
    "ReduceLROnPlateau({o}, patience=0)",
)

# `{m}` is the model, `{p}` the optimizer, `{l}` the loss, `{s}` the schedule, `{k}` the scaler, `{w}` the average.
_ZERO = ("{p}.zero_grad()", "{p}.zero_grad()", "{p}.zero_grad(set_to_none=False)", "{m}.zero_grad()")
_FORWARD = (
    *("{r} = {m}({a})",) * 4,
    "with torch.autocast('cpu', torch.bfloat16):\n    {r} = {m}({a}).float()",
    "{r} = torch.utils.checkpoint.checkpoint({m}, {a}, use_reentrant=False)",
    "{r} = {m}({a}) + {m}({a} * 2)",
    "{r} = torch.func.functional_call({m}, dict({m}.named_parameters()), ({a},))",
)
_LOSSES = (
    "{l} = {a}.square().mean()",
    "{l} = torch.nn.functional.mse_loss({a}, {x}.detach())",
    "{l} = {a}.sum() * {f}",
    "{l} = torch.nn.functional.cross_entropy({a}, torch.arange({a}.shape[0]) % 4)",
    "{l} = {a}.abs().mean() + sum(q.square().sum() for q in {m}.parameters()) * 0.1",
    "{l} = ({a} / {x}.detach()).sum()",  # infinite for some
)
_DIFFERENTIABLE = "{l}.backward(create_graph=True); {m}.zero_grad(); {l}.backward()"
_BACKWARD = (
    *("{l}.backward()",) * 6,
    "({l} / 2).backward()",
    "{l}.backward(retain_graph=True); {l}.backward()",
    "for q, g in zip({m}.parameters(), torch.autograd.grad({l}, [*{m}.parameters()])): q.grad = g",
    "torch.autograd.backward({l}, inputs=[q for q in {m}.parameters() if q.requires_grad])",
    _DIFFERENTIABLE,
)
_SCALED = ("{k}.scale({l}).backward()", "{k}.scale({l} / 2).backward()")
_GRADIENTS = (
    "torch.nn.utils.clip_grad_norm_({m}.parameters(), 0.5)",
    "torch.nn.utils.clip_grad_norm_({m}.parameters(), 0.5, foreach=False)",
    "torch.nn.utils.clip_grad_value_({m}.parameters(), 0.1)",
    "[q.grad.mul_(0.5) for q in {m}.parameters() if q.grad is not None]",
    "torch._foreach_mul_([q.grad for q in {m}.parameters() if q.grad is not None], 0.5)",
    "next({m}.parameters()).grad.add_(1.0)",
    "{r} = torch.nn.utils.clip_grad_norm_({m}.parameters(), float('inf'))",
    "next({m}.parameters()).grad = None",
)
_STEPS = (
    *("{p}.step()",) * 8,
    "if {l}.isfinite():\n    {p}.step()",
    "if shelf.n > 0:\n    {p}.step()",
    "with torch.no_grad():\n    for q in {m}.parameters():\n        if q.grad is not None:\n"
    "            q.sub_(q.grad, alpha={p}.param_groups[0]['lr'])",
    "{p}.param_groups[0]['lr'] *= 0.9; {p}.step()",
    "{p}.step(lambda: {l}.detach())",
)
_STEPS_SCALED = ("{k}.step({p}); {k}.update()", "{k}.unscale_({p}); {k}.step({p}); {k}.update()")
_AVERAGED = (
    "{w}.update_parameters({m})",
    "with torch.no_grad():\n    for q, new in zip({w}.parameters(), {m}.parameters()): q.lerp_(new, 0.1)",
)
_RETURNED = (
    "{l}.detach()",
    "{l}.detach()",
    "{l}.item()",
    "float({l})",
    "({l}.detach(), {p}.param_groups[0]['lr'])",
    "None",
    "{a}.detach()",
    "{'loss': {l}.detach(), 'out': [{a}.detach()]}",
    "types.SimpleNamespace(loss={l}.detach(), n=2)",
    "({l}.detach(), next({m}.parameters()).detach().clone())",
    "({l}.item(), {a}.detach().argmax(-1))",
)

_EVENTS_OF_OPTIMIZERS = (
    *("{p}.param_groups[0]['lr'] = {f}",) * 3,
    "{p}.param_groups[-1]['lr'] = torch.tensor(0.2)",
    "{p}.param_groups[0]['weight_decay'] = {f}",
    "{p}.param_groups[0]['maximize'] = True",
    "{p}.param_groups[0]['foreach'] = False",
    "{p}.load_state_dict({p}.state_dict())",
    "saved = copy.deepcopy({p}.state_dict()); {p}.load_state_dict(saved)",
    "{p}.state.clear()",
    "{p}.state[next(iter({p}.state))].clear()",
    "{p}.zero_grad(set_to_none=False)",
    "{p}.zero_grad()",
    "{p}.step()",
    "{p}.add_param_group({'params': [torch.nn.Parameter(torch.ones(2))], 'lr': 0.3})",
    "{h} = {p}.register_step_post_hook(lambda optimizer, args, kwargs: None)",
    "{h} = {p}.register_step_pre_hook(lambda optimizer, args, kwargs: None)",
    "{h} = {p}.register_step_post_hook(lambda optimizer, args, kwargs: totals.update(n=1))",
    "[s.update(step=s['step'] + 1) for s in {p}.state.values() if 'step' in s]",
)
_EVENTS_OF_MODELS = (
    "{p}.eval()",
    "{p}.train(not {p}.training)",
    "next({p}.parameters()).data.mul_(0.5)",
    "next({p}.parameters()).grad = None",
    "[setattr(q, 'grad', torch.ones_like(q)) for q in {p}.parameters()]",
    "[q.grad.zero_() for q in {p}.parameters() if q.grad is not None]",
    "next({p}.parameters()).requires_grad_(False)",
    "{p}.requires_grad_()",
    "{p}.load_state_dict({k: v.clone() for k, v in {p}.state_dict().items()})",
    "{p}.load_state_dict({k: v.clone() for k, v in {p}.state_dict().items()}, assign=True)",
    "{h} = next({p}.parameters()).register_hook(lambda g: g * 2)",
    "{h} = next({p}.parameters()).register_post_accumulate_grad_hook(lambda q: q.grad.mul_(0.5))",
    "{h} = {p}.register_forward_hook(lambda module, inputs, output: output * {f})",
    "{h} = {p}.register_full_backward_hook(count_backward)",
    "kept = [q.grad for q in {p}.parameters()]; [g.mul_(2) for g in kept if g is not None]",
    "kept = [q.detach() for q in {p}.parameters()]; kept[0].add_(1.0)",
    "next({p}.parameters()).data = next({p}.parameters()).data.clone()",
)
_EVENTS_OF_SCHEDULES = (
    "{p}.step()",
    "{p}.load_state_dict({p}.state_dict())",
    "{p}.last_epoch = 5",
    "{p}.base_lrs[0] = {f}",
)
_EVENTS_OF_SCALERS = ("{p}.update(2.0)", "{p}.set_growth_interval({i})", "{p}.load_state_dict({p}.state_dict())")
_EVENTS_OF_AVERAGES = ("{p}.n_averaged.zero_()", "[q.data.mul_(0.5) for q in {p}.parameters()]")
_EVENTS_OF_THE_CALLER = (
    "shelf.n = 0",
    "shelf.n = 2",
    "torch.manual_seed({i})",
    "torch.set_default_dtype(torch.float64)",
)

# How a step is compiled, and its options.
_WAYS = {
    "train_step": ("", "", "release_gradients=True", "release_gradients=False"),
    "compile": ("", "", "inplace=True", "dynamic=False", "partition='min_cut'"),
    "aot": ("", "partition_fn=foregrad.min_cut_rematerialization_partition"),
}


def generate(seed: int | str, number: int) -> StateProgram:
    """Make the training step of a seed and a number, always the same.

    >>> generate(0, 1) == generate(0, 1)
    True

    Args:
        seed: The seed of the run.
        number: The program's place in it.
    """
    return drawn(StepGenerator, f"steps/{seed}/{number}")


class StepGenerator(ProgramGenerator):
    """Draws one training step."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._drawing.family = _FAMILY
        self._drawing.form = self._rng.choices(list(_FORMS), list(_FORMS.values()))[0]
        self._kinds = tuple(kind for kind in self._kinds if not kind.name.startswith(("opt", "sched", "scaler")))
        self._way = self._rng.choice(list(_WAYS))
        self._way_options = self._rng.choice(_WAYS[self._way])
        self._has_symbols = False
        self._parts: dict[str, Object] = {}

    def _options(self, computed_once: bool = False) -> str:
        return getattr(self, "_way_options", "")

    def _so_far(self) -> StateProgram:
        return replace(super()._so_far(), way=self._way)

    # ------------------------------------------------------------------------------------------------ objects
    def _draw_objects(self) -> None:
        rng = self._rng
        model = self._add_object("m", "model", rng.choice(_MODELS), _EVENTS_OF_MODELS)
        optimizer = self._drawn_optimizer(rng.choice(_PARAMETERS).replace("{m}", model))
        optimizer = self._add_object("p", "optimizer", optimizer, _EVENTS_OF_OPTIMIZERS)
        if rng.random() < 0.5:
            schedule = rng.choice(_SCHEDULES).replace("{o}", optimizer).replace("{in}", "torch.optim.lr_scheduler")
            made = f"torch.optim.lr_scheduler.{schedule}"
            self._add_object("s", schedule.partition("(")[0], made, _EVENTS_OF_SCHEDULES)
        if rng.random() < 0.2:
            scaler = "torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=2)"
            self._add_object("k", "scaler", scaler, _EVENTS_OF_SCALERS)
        if rng.random() < 0.2:
            average = f"torch.optim.swa_utils.AveragedModel({model})"
            self._add_object("w", "averaged model", average, _EVENTS_OF_AVERAGES)
        if rng.random() < _MORE_STATEMENTS:
            super()._draw_objects()

    def _drawn_optimizer(self, parameters: str) -> str:
        rng = self._rng
        world = drawing_world(self._so_far())
        while True:
            name, options = rng.choice(_OPTIMIZERS)
            chosen = "".join(rng.choice(some) for some in options)
            made = f"torch.optim.{name}({parameters}, {rng.choice(_RATES)}{chosen})"
            if world.do(compile(made, "<optimizer>", "eval"), len) is None:
                return made

    def _add_object(self, letter: str, name: str, made: str, events: tuple[str, ...]) -> str:
        """Add an object of the step, for a placeholder; its name."""
        drawing = self._drawing
        value = f"o{drawing.number()}"
        drawing.parts.append(Part(f"{value} = {made}", "object", name))
        self._parts[letter] = Object(Kind(name, events=events), (), (value,))
        drawing.objects.append(self._parts[letter])
        return value

    # --------------------------------------------------------------------------------------------- statements
    def _draw_statements(self, world: World) -> None:
        scope, rng = self._scope(world), self._rng
        early, scaled = rng.random() < 0.5, "k" in self._parts
        self._take(world, scope, _ZERO if early else ())
        self._take(world, scope, _FORWARD)
        self._more(world, scope)
        self._take(world, scope, _LOSSES)
        # What `train_step` leaves in gradients cannot be differentiated.
        backward = [how for how in _BACKWARD if how != _DIFFERENTIABLE or self._way != "train_step"]
        self._take(world, scope, _SCALED if scaled else tuple(backward))
        self._take(world, scope, _GRADIENTS if rng.random() < 0.4 else ())
        self._more(world, scope)
        self._take(world, scope, _STEPS_SCALED if scaled else _STEPS)
        self._take(world, scope, _AVERAGED if "w" in self._parts else ())
        late = [_ZERO if not early or rng.random() < 0.2 else (), self._scheduling()]
        for table in rng.sample(late, len(late)):
            self._take(world, scope, table)

    def _scheduling(self) -> tuple[str, ...]:
        if "s" not in self._parts or self._rng.random() < 0.4:
            return ()
        plateau = "Plateau" in self._parts["s"].kind.name
        return ("{s}.step({l}.detach())", "{s}.step({l})") if plateau else ("{s}.step()",)

    def _more(self, world: World, scope: dict[str, object]) -> None:
        """Now and then a statement of other stateful programs."""
        if len(self._drawing.objects) > 2 and self._rng.random() < _MORE_STATEMENTS:
            statement = self._statement()
            if statement is not None and self._fits(statement, world, scope):
                self._drawing.statements.append(statement)

    def _take(self, world: World, scope: dict[str, object], table: tuple[str, ...]) -> None:
        """Add one statement of a table, if there is one that can be run."""
        for template in self._rng.sample(table, len(table)):
            statement = Part(self._filled(template), "part of a step", template)
            if self._fits(statement, world, scope):
                self._drawing.statements.append(statement)
                return

    def _filled(self, template: str) -> str:
        names = {letter: self._path(drawn) for letter, drawn in self._parts.items()}
        return self._drawing.fill(template, l=_LOSS, **names)

    def _returned(self) -> str:
        return self._filled(self._rng.choice(_RETURNED))

    # -------------------------------------------------------------------------------------------------- steps
    def _argument(self, plain: bool = False) -> str:
        """Mostly a batch as loaders give it: what is computed before the call is no part of a step."""
        source = super()._argument(plain)
        return source if plain or self._rng.random() < 0.03 else source.removesuffix(".requires_grad_() * 1")

    def _with_steps(self, program: StateProgram) -> StateProgram:
        """Steps in eager, with something between them now and then."""
        world, rng = drawing_world(program), self._rng
        for call in range(rng.choice(_CALLS)):
            if call == 0 or rng.random() < 0.3:
                self._new_arguments(world, program)
            if not self._add_call(world, program):
                break
            for _ in range(rng.choice([0, 0, 1, 1, 2])):
                self._add_event(world, program)
        return self._finished(program)

    def _event(self, program: StateProgram) -> Part | None:
        if (chance := self._rng.random()) < 0.1:
            source = self._rng.choice(_EVENTS_OF_THE_CALLER)
            return Part(self._drawing.fill(source), "event", source)
        return self._object_event(program) if chance < 0.85 else super()._event(program)
