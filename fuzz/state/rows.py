"""Statements and steps that need no object: what programs compute, ask and leave, and what happens between calls."""

# Placeholders are those of `kinds.py`; `{x}` is an argument of the program, `{arg}` one that a caller holds, `{res}` a
# result that the caller holds, `{handle}` a handle of a hook.

COMPUTE = (
    "{r} = {a}.sin()",
    "{r} = {a} * {b}",
    "{r} = {a} + {b}",
    "{r} = torch.sin({a})",
    "{r} = {a}.cos()",
    "{r} = torch.nn.functional.relu({a})",
    "{r} = {a}.mul({f})",
    "{r} = torch.add({a}, {f})",
    "{r} = torch.nn.functional.linear({a}, torch.eye(4))",
    "{r} = {a}.transpose(0, -1).contiguous().transpose(0, -1) * 2",
    "{r} = {a} + torch.tensor([1.0, 2.0, 3.0, 4.0])",
    "{r} = {a} @ torch.ones(4, 4)",
    "{r} = {a}.softmax(-1)",
    "{r} = {a} - {a}.mean()",
    "{r} = {a}.clone()",
    "{r} = {a}.view_as({a})",
    "{r} = {a}[..., :4]",
    "{r} = {a}.detach() * {b}",
    "{r} = {a}.float()",
)

RANDOM = (
    "{r} = {a} * random.random()",
    "{r} = {a} * float(numpy.random.rand())",
    "{r} = {a} + torch.rand(4)",
    "{r} = torch.nn.functional.dropout({a}, 0.5)",
    "{r} = {a} * random.choice([1, 2, 3])",
    "{r} = {a} + torch.randn(4)",
)

# State of the process, and facts of tensors beside their data.
QUESTIONS = (
    "{r} = {a} * 2 if torch.is_grad_enabled() else {a}",
    "{r} = {a} + torch.ones(4)",
    "{r} = {a} * (2 if torch.get_default_dtype() is torch.float64 else 3)",
    "{r} = {a} * 2 if torch.are_deterministic_algorithms_enabled() else {a}",
    "{r} = {a} * 2 if torch.is_anomaly_enabled() else {a}",
    "{r} = {a} * 2 if torch.backends.mkldnn.enabled else {a}",
    "{r} = {a} * 2 if torch.backends.cudnn.benchmark else {a}",
    "{r} = {a} * 2 if torch.is_autocast_enabled('cpu') else {a}",
    "{r} = {a} * 2 if torch.is_inference_mode_enabled() else {a}",
    "{r} = {a} * 2 if torch.get_float32_matmul_precision() == 'high' else {a}",
    "{r} = torch.nn.functional.scaled_dot_product_attention({a}, {a}, {a})",
    "{r} = {a} * (1 + {x}._version)",
    "{r} = {a} * 2 if {x}._base is None else {a}",
    "{r} = {a} * 2 if {x}.grad_fn is None else {a}",
    "{r} = {a} * 2 if {x}.is_leaf else {a}",
    "{r} = {a} * 2 if {x}.retains_grad else {a}",
    "{r} = {a} * 2 if {x}._backward_hooks else {a}",
    "{r} = {a} * 2 if {x}.grad is None else {a} + {x}.grad",
    "{r} = {a} * 2 if {x}.is_contiguous() else {a}",
    "{r} = {a} * {x}.stride(0)",
    "{r} = {a} * 2 if {x}.storage_offset() else {a}",
    "{r} = {a} * getattr({x}, 'tag', 0.5)",
    "{r} = {a} * 2 if {x}.is_shared() else {a}",
    "{r} = {a} * 2 if {x}.is_inference() else {a}",
    "{r} = {a} * {x}.shape[0]",
    "{r} = {a} * {a}.stride(-1)",
    "{r} = {a} * 2 if {a}.is_contiguous() else {a}",
    "{r} = {a} * len(str({a}))",
    "{r} = {a} * 2 if isinstance({x}.shape[0], int) else {a}",
    "{r} = {a} * len(f'{{x}.dtype} {{x}.device}')",
    "{r} = {a} * 2 if {x}.is_set_to({x}) else {a}",
    "{r} = {a} * 2 if type({x}) is torch.nn.Parameter else {a}",
    "{r} = {a} * 2 if torch.is_tensor({x}) else {a}",
)

EFFECTS = (
    "{x}.add_(1)",
    "{x}.mul_({f})",
    "{x}.tag = 2.0",
    "{x}.seen = {a}",
    "{a}.register_hook(lambda g: g * 2)",
    "{a}.retain_grad()",
    "{x}.grad = None",
    "{a}.register_hook(lambda g: g * shelf.n)",
    "{a}.register_hook(lambda g: gradients.append(g))",
    "print({a}, file=io.StringIO())",
    "{a}.register_hook(lambda g: totals.update(g=totals['g'] + 1))",
    "collect(None, (), {a})",
    "gradients.append({a}.detach())",
    "totals['n'] += 1",
    "totals['last'] = {a}",
    "setattr(shelf, 'last', {a})",
    "shelf.n += 1",
    "{x}.requires_grad_()",
    "{x}.data = {x}.data * 2",
)

BLOCKS = (
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 1):",
)

# How the caller calls. Hooks that copy what is saved at once would miss what RReLU writes to it afterwards.
CALLS = ("{call}",) * 12 + (
    "with torch.no_grad(): {call}",
    "with torch.inference_mode(): {call}",
    "with torch.autocast('cpu', torch.bfloat16): {call}",
    "with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.clone()): {call}",
    "with torch.autograd.graph.saved_tensors_hooks(pack, unpack): {call}",
    "with torch.enable_grad(): {call}",
    "with torch.autograd.detect_anomaly(check_nan=False): {call}",
)

MODES = (
    "torch.set_grad_enabled(False)",
    "torch.set_grad_enabled(True)",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_dtype(torch.float32)",
    "torch.use_deterministic_algorithms(True)",
    "torch.use_deterministic_algorithms(False)",
    "torch.autograd.set_detect_anomaly(True, check_nan=False)",
    "torch.autograd.set_detect_anomaly(False)",
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.mkldnn.set_flags(False)",
    "torch.backends.cudnn.benchmark = True",
    "torch.backends.mha.set_fastpath_enabled(False)",
    "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.backends.cuda.enable_math_sdp(False)",
    "torch.manual_seed({i})",
    "random.seed({i})",
    "numpy.random.seed({i})",
)

GLOBAL_EVENTS = (
    "{h} = torch.nn.modules.module.register_module_forward_hook(double_output)",
    "{h} = torch.nn.modules.module.register_module_forward_hook(count_calls)",
    "{h} = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: None)",
    "{h} = torch.nn.modules.module.register_module_full_backward_hook(count_backward)",
    "torch.sin = lambda v: v * 3",
    "torch.sin = original_sin",
    "torch.Tensor.cos = lambda self: self * 4",
    "torch.nn.functional.relu = lambda v, inplace=False: v * 5",
    "torch.nn.functional.linear = lambda v, weight, bias=None: v @ weight",
    "torch.nn.Linear.forward = lambda self, v: v * 2",
    "torch.add = lambda v, w: v - w",
    "totals['n'] = {i}",
    "shelf.n = {f}",
    "activations.clear()",
    "gradients.clear()",
)

# What a program must mention for an event to be worth drawing.
MENTIONED = {
    "torch.sin = lambda v: v * 3": r"torch\.sin\(",
    "torch.sin = original_sin": r"torch\.sin\(",
    "torch.Tensor.cos = lambda self: self * 4": r"\.cos\(",
    "torch.nn.functional.relu = lambda v, inplace=False: v * 5": r"relu|ReLU",
    "torch.nn.functional.linear = lambda v, weight, bias=None: v @ weight": r"linear|Linear",
    "torch.nn.Linear.forward = lambda self, v: v * 2": r"Linear",
    "torch.add = lambda v, w: v - w": r"torch\.add",
    "{h} = torch.nn.modules.module.register_module_forward_hook(double_output)": r"nn\.[A-Z]",
    "{h} = torch.nn.modules.module.register_module_forward_hook(count_calls)": r"nn\.[A-Z]",
    "{h} = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: None)": r"nn\.[A-Z]",
    "{h} = torch.nn.modules.module.register_module_full_backward_hook(count_backward)": r"nn\.[A-Z]",
    "totals['n'] = {i}": r"totals|count_calls",
    "shelf.n = {f}": r"shelf|double_output",
    "activations.clear()": r"collect",
    "gradients.clear()": r"gradients",
}

ARGUMENT_EVENTS = (
    "{arg}.data.mul_({f})",
    "{arg}.detach().add_({f})",
    "{arg}.tag = {f}",
    "{arg}.requires_grad_(not {arg}.requires_grad)",
    "{arg}.grad = None",
    "{arg}.grad = torch.ones_like({arg})",
    "{h} = {arg}.register_hook(lambda g: g * 2)",
    "{arg} = {arg}.clone()",
    "{arg} = {arg}.detach().clone().requires_grad_()",
    "{arg} = {arg} * 1",
    "{arg} = {arg}.double()",
    "{arg} = {arg}[:1]",
    "{arg} = {arg}.transpose(0, -1).contiguous().transpose(0, -1)",
    "{arg}.share_memory_()",
    "{arg}.retain_grad()",
)

RESULT_EVENTS = (
    "write({res}, lambda t: t.add_(1))",
    "write({res}, lambda t: t.zero_())",
    "write({res}, lambda t: t.mul_(-1))",
    "write({res}, lambda t: t.detach().fill_(7.0))",
    "write({res}, lambda t: t.data.add_(1))",
    "write({res}, lambda t: t.requires_grad_())",
    "write({res}, lambda t: t[:1].mul_(2))",
    "{res} = None",
)

# What scripts define when something mentions it.
SUPPORT: dict[str, str] = {
    "activations": "activations = []",
    "gradients": "gradients = []",
    "totals": "totals = collections.Counter(n=1)",
    "shelf": "shelf = types.SimpleNamespace(n=1, last=None)",
    "collect": "def collect(module, inputs, output):\n    activations.append(output)",
    "double_output": "def double_output(module, inputs, output):\n    return output * 2 if shelf.n else output",
    "count_calls": "def count_calls(module, inputs, output):\n    totals['n'] += 1",
    "count_backward": "def count_backward(module, grad_inputs, grad_outputs):\n    totals['n'] += 1",
    "pack": "def pack(tensor):\n    return [tensor]",
    "unpack": "def unpack(packed):\n    return packed[0].clone()",
    "original_sin": "original_sin = torch.sin",
    "Halved": "class Halved(torch.nn.Module):\n    def forward(self, v):\n        return v / 2",
    "set_cell": (
        "def set_cell(function, name, value):\n"
        "    function.__closure__[function.__code__.co_freevars.index(name)].cell_contents = value"
    ),
    "write": (
        "def write(result, change):\n"
        "    for tensor in torch.utils._pytree.tree_leaves(result):\n"
        "        if isinstance(tensor, torch.Tensor):\n"
        "            change(tensor)"
    ),
}
