"""Layers, what users do with them, and the layouts of what goes into them.

Every tensor has four channels, in its last dimension and in its second one, so that most layers fit most shapes.
"""

from .kinds import Kind

# The shape of an argument, by the number of its dimensions, and another one for a later call.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "rows": ((3, 4), (2, 4), (1, 4)),
    "sequence": ((2, 4, 4), (3, 4, 4), (1, 4, 4)),
    "image": ((2, 4, 3, 4), (1, 4, 3, 4), (2, 4, 1, 4)),
}

_EVERYWHERE = (
    "torch.nn.Linear(4, 4)",
    "torch.nn.LayerNorm(4)",
    "torch.nn.RMSNorm(4)",
    "torch.nn.GroupNorm(2, 4)",
    "torch.nn.Dropout(0.5)",
    "torch.nn.AlphaDropout(0.5)",
    "torch.nn.PReLU()",
    "torch.nn.ReLU(inplace=True)",
    "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())",
    "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.LayerNorm(4))",
    "torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))",
    "torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))",
    "torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Tanh()])[0]",
)

LAYERS: dict[str, tuple[str, ...]] = {
    "rows": (*_EVERYWHERE, "torch.nn.BatchNorm1d(4)", "torch.nn.BatchNorm1d(4, momentum=None)"),
    "sequence": (
        *_EVERYWHERE,
        "torch.nn.BatchNorm1d(4)",
        "torch.nn.InstanceNorm1d(4, affine=True, track_running_stats=True)",
        "torch.nn.Conv1d(4, 4, 3, padding=1)",
        "torch.nn.Conv1d(4, 4, 1, groups=2)",
        "torch.nn.MaxPool1d(3, 1, 1)",
        "torch.nn.AvgPool1d(3, 1, 1)",
        "torch.nn.Dropout1d(0.5)",
        "torch.nn.ChannelShuffle(2)",
        "torch.nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)",
    ),
    "image": (
        *_EVERYWHERE,
        "torch.nn.BatchNorm2d(4)",
        "torch.nn.BatchNorm2d(4, track_running_stats=False)",
        "torch.nn.InstanceNorm2d(4)",
        "torch.nn.Conv2d(4, 4, 3, padding=1)",
        "torch.nn.ConvTranspose2d(4, 4, 1)",
        "torch.nn.MaxPool2d(3, 1, 1)",
        "torch.nn.AvgPool2d(3, 1, 1)",
        "torch.nn.Dropout2d(0.5)",
        "torch.nn.ChannelShuffle(2)",
        "torch.nn.LocalResponseNorm(2)",
        "torch.nn.AdaptiveAvgPool2d((3, 4))",
        "torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.ReLU())",
    ),
}

# Ways to lay out a tensor of a shape; `{full}` is a contiguous one, `{shape}` the shape.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "any": (
        "{full}",
        "{full}",
        "{full}",
        "{full}.transpose(0, -1).contiguous().transpose(0, -1)",
        "{full}.transpose(0, 1).contiguous().transpose(0, 1)",
        "{full}.transpose(-1, -2).contiguous().transpose(-1, -2)",
        "torch.cat([{full}, {full}])[::2]",
        "torch.cat([{full}, {full}])[-{batch}:]",
        "{full}[:1].expand({shape})",
        "{full}[..., :1].expand({shape})",
    ),
    "image": ("{full}.to(memory_format=torch.channels_last)", "{full}.to(memory_format=torch.channels_last)"),
}

_LAYER_EVENTS = (
    "{p}.eval()",
    "{p}.eval()",
    "{p}.train(not {p}.training)",
    "{p}.train(not {p}.training)",
    "{p}.eval()",
    "{p}.train()",
    "{p}.train(not {p}.training)",
    "{p}.requires_grad_(False)",
    "{p}.requires_grad_()",
    "{p}.zero_grad()",
    "{p}.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in {p}.state_dict().items()})",
    "{p}.load_state_dict({k: v.clone() for k, v in {p}.state_dict().items()}, assign=True)",
    "{p}.double(); {p}.float()",
    "next({p}.parameters()).data.mul_(0.5)",
    "next({p}.parameters()).requires_grad_(False)",
    "{p}.weight = torch.nn.Parameter({p}.weight.detach() * 2)",
    "{p}.bias = None",
    "{p}.bias = torch.nn.Parameter(torch.ones(4))",
    "{p}.register_buffer('extra', torch.ones(4))",
    "{p}.note = {f}",
    "{h} = {p}.register_forward_hook(double_output)",
    "{h} = {p}.register_forward_hook(lambda module, inputs, output: output + {f})",
    "{h} = {p}.register_forward_hook(collect)",
    "{h} = {p}.register_forward_hook(count_calls)",
    "{h} = {p}.register_forward_pre_hook(lambda module, inputs: (inputs[0] * {f},))",
    "{h} = {p}.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)",
    "{h} = {p}.register_full_backward_hook(lambda module, gi, go: tuple(g * 2 for g in gi if g is not None) or None)",
    "{h} = {p}.register_full_backward_hook(count_backward)",
    "{h} = {p}.register_full_backward_pre_hook(lambda module, go: tuple(g * 2 for g in go if g is not None))",
    "{h} = {p}.register_forward_hook(double_output, always_call=True)",
    "{p}.forward = lambda v: v * {f}",
    "{p}.__class__ = type('Child', (type({p}),), {'forward': lambda self, v: v * 2, '__module__': __name__})",
    "{p}.inplace = not getattr({p}, 'inplace', False)",
    "{p}.p = 0.25",
    "{p}.eps = 0.5",
    "{p}.momentum = 0.5",
    "{p}.running_mean = torch.ones(4)",
    "{p}.num_batches_tracked.add_(1)",
    "torch.nn.utils.parametrize.register_parametrization({p}, 'weight', Halved())",
    "torch.nn.utils.parametrize.remove_parametrizations({p}, 'weight')",
    "{p}._parameters['bias'] = None",
    "{p}.add_module('extra', torch.nn.ReLU())",
)

_LAYER_WRITES = (
    "{p}.last = {a}",
    "{p}.count = getattr({p}, 'count', 0) + 1",
    "{p}.eval()",
    "{p}.weight.data.mul_(0.5)",
    "{p}.register_buffer('seen', {a}.detach().mean())",
    "{r} = {a} * {p}.training",
    "hook = {p}.register_forward_hook(double_output); {r} = {p}({a}); hook.remove()",
    "{p}.weight.grad = None",
    "{p}.zero_grad()",
)

_LAYER_READS = (
    "{r} = {p}({a})",
    "{r} = {p}({a})",
    "{r} = {p}({a})",
    "{r} = {p}({a})",
    "{r} = {p}({a}.transpose(0, -1).contiguous().transpose(0, -1))",
    "{r} = {p}({a}.contiguous())",
    "{r} = {a} * sum(q.sum() for q in {p}.parameters())",
    "{r} = {a} + len({p}.state_dict())",
    "{r} = {a} * getattr({p}, 'note', 2.0)",
    "{r} = {a} + len({p}._forward_hooks)",
    "{r} = {p}.forward({a})",
    "{r} = torch.utils.checkpoint.checkpoint({p}, {a}, use_reentrant=False)",
    "{r} = torch.func.functional_call({p}, dict({p}.named_parameters()), ({a},))",
)

_OWN_CLASS = """class {O}(torch.nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.layer = {layer}
        self.n = 2
        self.last = None
        self.options = {"gain": 0.5}
        self.register_buffer("calls", torch.zeros(()))

    def helper(self, v):
        return v * self.n

    def forward(self, v):
        {body}
        return self.helper(self.layer(v)) * self.scale + self.options["gain"]


{o} = {O}()"""

_BODIES = (
    "self.calls.add_(1)",
    "self.last = v",
    "self.last = v.detach()",
    "self.n += 1",
    "self.n = self.n",
    "self.calls = self.calls + 1",
    "self.options['last'] = v",
    "v = v * 2 if self.training else v",
    "v = v if self.last is None else v + self.last.mean().detach()",
    "pass",
)

_OWN_EVENTS = (
    "{p}.n = {i}",
    "{O}.scale = {f}",
    "{p}.scale = {f}",
    "{O}.forward = lambda self, v: self.layer(v) - self.n",
    "{O}.helper = lambda self, v: v + self.n",
    "{O}.forward.__code__ = (lambda self, v: self.layer(v) * 3).__code__",
    "{p}.options['gain'] = {f}",
    "{p}.options = {'gain': {f}}",
    "{p}.layer = torch.nn.Identity()",
    "{p}.last = None",
    "{p}.calls.fill_({f})",
    "{O}.__call__ = lambda self, v: v * 2",
    "{p}.n = float({p}.n)",
)

_TRAINED = """{o}_layer = torch.nn.Linear(4, 4)
{o} = {optimizer}"""

OPTIMIZERS = (
    "torch.optim.SGD({o}_layer.parameters(), lr=0.1)",
    "torch.optim.SGD({o}_layer.parameters(), lr=0.1, momentum=0.9)",
    "torch.optim.SGD({o}_layer.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True)",
    "torch.optim.Adam({o}_layer.parameters(), lr=0.1)",
    "torch.optim.Adam([{'params': [{o}_layer.weight]}, {'params': [{o}_layer.bias], 'lr': 0.5}], amsgrad=True)",
    "torch.optim.AdamW({o}_layer.parameters(), lr=torch.tensor(0.1))",
    "torch.optim.AdamW({o}_layer.parameters(), lr=0.1, foreach=True)",
    "torch.optim.RMSprop({o}_layer.parameters(), lr=0.1, centered=True, momentum=0.5)",
    "torch.optim.Adagrad({o}_layer.parameters(), lr=0.1, lr_decay=0.5)",
    "torch.optim.Adadelta({o}_layer.parameters())",
    "torch.optim.Adamax({o}_layer.parameters(), lr=0.1)",
    "torch.optim.NAdam({o}_layer.parameters(), lr=0.1)",
    "torch.optim.RAdam({o}_layer.parameters(), lr=0.1)",
    "torch.optim.Rprop({o}_layer.parameters(), lr=0.1)",
    "torch.optim.ASGD({o}_layer.parameters(), lr=0.1)",
)

_BACKWARD = "{o}_layer({a}.detach()).sum().backward()"

_SCHEDULERS = (
    "torch.optim.lr_scheduler.StepLR({optimizer}, 1)",
    "torch.optim.lr_scheduler.ExponentialLR({optimizer}, 0.5)",
    "torch.optim.lr_scheduler.CosineAnnealingLR({optimizer}, 3)",
    "torch.optim.lr_scheduler.LambdaLR({optimizer}, lambda epoch: 0.5**epoch)",
    "torch.optim.lr_scheduler.OneCycleLR({optimizer}, 0.5, total_steps=9)",
    "torch.optim.lr_scheduler.LinearLR({optimizer}, total_iters=2)",
    "torch.optim.lr_scheduler.CyclicLR({optimizer}, 0.1, 0.5, 2, cycle_momentum=False)",
)

_PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau({optimizer}, patience=0)"

_SCALED = """{o}_layer = torch.nn.Linear(4, 4)
{o}_optimizer = {optimizer}
{o} = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)"""

_SCALED_BACKWARD = "{p}.scale({o}_layer({a}.detach()).sum() * {factor}).backward()"
_SCALED_STEP = "{p}.step({o}_optimizer); {p}.update(); {o}_optimizer.zero_grad()"

_OPTIMIZER_EVENTS = (
    "{p}.param_groups[0]['lr'] = {f}",
    "[q.grad is None for q in {o}_layer.parameters()] and {p}.step()",
    "[setattr(q, 'grad', torch.ones_like(q)) for q in {o}_layer.parameters()]; {p}.step()",
    "{p}.zero_grad()",
    "{p}.zero_grad(set_to_none=False)",
    "{p}.load_state_dict({p}.state_dict())",
    "{p}.param_groups[0]['weight_decay'] = {f}",
    "{h} = {p}.register_step_post_hook(lambda optimizer, args, kwargs: None)",
)

_SCHEDULER_EVENTS = (
    "{p}.step()",
    "{p}.base_lrs[0] = {f}",
    "{p}.optimizer.param_groups[0]['lr'] = {f}",
    "{p}.last_epoch = 5",
)


def layer_kinds(family: str) -> tuple[Kind, ...]:
    """The kinds of layers for tensors of a shape.

    >>> [kind.name for kind in layer_kinds("image")][:2]
    ['layer', 'noisy layer']

    Args:
        family: A key of `SHAPES`.
    """
    layers = LAYERS[family]
    own = tuple(
        Kind(
            "module of a class",
            ("{O}()",),
            _OWN_CLASS.replace("{layer}", layer).replace("{body}", _BODIES[position % len(_BODIES)]),
            numbers=("{p}.n", "{p}.scale"),
            tensors=("{p}.calls",),
            reads=_LAYER_READS,
            writes=(*_LAYER_WRITES, "{p}.n += 1", "{p}.calls.add_(1)", "{p}.options['t'] = {a}"),
            events=(*_OWN_EVENTS, *_OWN_EVENTS, *_LAYER_EVENTS),
            weight=20 / len(layers),
        )
        for position, layer in enumerate(layers)
    )
    return (
        Kind("layer", layers, reads=_LAYER_READS, writes=_LAYER_WRITES, events=_LAYER_EVENTS, weight=24),
        # RReLU writes to what autograd has saved already, so that no checkpoint and no hook can follow it.
        Kind("noisy layer", ("torch.nn.RReLU()",), reads=_LAYER_READS[:5], events=_LAYER_EVENTS[:8]),
        *own,
        Kind(
            "embedding",
            ("torch.nn.Embedding(5, 4)", "torch.nn.Embedding(5, 4, max_norm=1.0)"),
            reads=("{r} = {a} + {p}(torch.tensor([0, 2, 2, 4]))[1]", "{r} = {a} * {p}.weight.sum()"),
            events=(
                "{p}.weight.data.mul_(0.5)",
                "{p}.requires_grad_(False)",
                "{p}.padding_idx = 2",
                "{p}.max_norm = 0.5",
            ),
        ),
        *_trained_kinds(),
    )


def _trained_kinds() -> tuple[Kind, ...]:
    """Optimizers, schedulers and gradient scalers, over a layer of their own."""
    optimizers = tuple(
        Kind(
            "optimizer",
            (),
            _TRAINED.replace("{optimizer}", optimizer),
            numbers=("float({p}.param_groups[0]['lr'])", "len({p}.state)"),
            reads=("{r} = {o}_layer({a})", "{r} = {o}_layer({a})"),
            writes=(
                "{p}.step()",
                "{p}.zero_grad()",
                "{p}.param_groups[0]['lr'] = 0.2",
                f"{_BACKWARD}; {{p}}.step(); {{p}}.zero_grad()",
                f"{_BACKWARD}; {{p}}.step(); {{p}}.zero_grad()",
                f"{_BACKWARD}; {{p}}.step()",
                f"{_BACKWARD}; torch.nn.utils.clip_grad_norm_({{o}}_layer.parameters(), 0.5); {{p}}.step()",
            ),
            events=_OPTIMIZER_EVENTS,
            weight=5 / len(OPTIMIZERS),
        )
        for optimizer in OPTIMIZERS
    )
    schedulers = tuple(
        Kind(
            "scheduler",
            (),
            _TRAINED.replace("{optimizer}", scheduler.replace("{optimizer}", OPTIMIZERS[0])),
            numbers=("{p}.get_last_lr()[0]", "{p}.last_epoch", "{p}.optimizer.param_groups[0]['lr']"),
            reads=("{r} = {o}_layer({a})",),
            writes=(
                *("{p}.step()", f"{_BACKWARD}; {{p}}.optimizer.step(); {{p}}.step()") * (scheduler is not _PLATEAU),
                *("{p}.step({a}.detach().mean())", "{p}.step({a}.mean().item())") * (scheduler is _PLATEAU),
            ),
            events=_SCHEDULER_EVENTS,
            weight=2 / len(_SCHEDULERS),
        )
        for scheduler in (*_SCHEDULERS, _PLATEAU)
    )
    scalers = tuple(
        Kind(
            "scaler",
            (),
            _SCALED.replace("{optimizer}", optimizer),
            numbers=("{p}.get_scale()",),
            reads=("{r} = {p}.scale({o}_layer({a}))", "{r} = {o}_layer({a})"),
            writes=tuple(
                "; ".join([_SCALED_BACKWARD.replace("{factor}", factor), *unscaled, _SCALED_STEP])
                for factor in ("1.0", "{a}.detach().mean()", "float('inf')")
                for unscaled in ([], ["{p}.unscale_({o}_optimizer)"])
            ),
            events=("{p}.update(2.0)", "{p}.set_growth_interval({i})", "{o}_optimizer.param_groups[0]['lr'] = {f}"),
        )
        for optimizer in (OPTIMIZERS[1], OPTIMIZERS[3])
    )
    return (*optimizers, *schedulers, *scalers)
