"""The oracle of export: a program that was exported, saved and loaded does what the module does."""

import copy

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import foregrad.export
from foregrad.errors import ExportError


class Net(nn.Module):
    """A body; its parameters and buffers by name."""

    def __init__(self, body, **state):
        super().__init__()
        self.body = body
        for name, tensor in state.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=not name.startswith("temporary"))

    def forward(self, x, *more, **named):
        return self.body(self, x, *more, **named)


def cloned(value):
    """The same values, in tensors of their own."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)


def require_same(mine, wanted, what):
    """Values, shapes, dtypes and structure."""
    found, spec = pytree.tree_flatten(mine)
    expected, wanted_spec = pytree.tree_flatten(wanted)
    assert spec == wanted_spec, what
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), what
            torch.testing.assert_close(a.detach(), b.detach(), equal_nan=True, msg=lambda text: f"{what}: {text}")
        else:
            assert type(a) is type(b) and a == b, what


def runners(exported, path):
    """What runs an exported program, with its state: as it is, loaded, and loaded by torch itself."""
    exported.save(path)
    again = foregrad.export.load(path)
    theirs = torch.export.load(path).module()
    state = dict(theirs.named_parameters(remove_duplicate=False)) | dict(theirs.named_buffers(remove_duplicate=False))
    return [("run", exported, exported.state), ("load", again, again.state), ("torch.export", theirs, state)]


def compare(module, args, path, loss=0, calls=None, kwargs=None, **options):
    """Export a module, and run it as often as `calls` has arguments for, beside the module itself."""
    kwargs = kwargs or {}
    exported = foregrad.export.export(copy.deepcopy(module), cloned(args), cloned(kwargs), loss=loss, **options)
    everything = runners(exported, path)
    for call in calls or [args, args]:
        eager_call = cloned((call, kwargs))
        torch.manual_seed(1)
        with torch.set_grad_enabled(loss is not None):
            wanted = module(*eager_call[0], **eager_call[1])
        gradients, of_inputs = {}, []
        if loss is not None:
            module.zero_grad()
            pytree.tree_leaves(wanted)[loss].backward()
            gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            tensors = [t for t in pytree.tree_leaves(eager_call) if isinstance(t, Tensor) and t.is_leaf]
            of_inputs = [t.grad for t in tensors if t.grad is not None]
        eager_state = dict(module.named_parameters(remove_duplicate=False))
        eager_state |= dict(module.named_buffers(remove_duplicate=False))
        for what, run, state in everything:
            given = cloned((call, kwargs))
            torch.manual_seed(1)
            with torch.no_grad():
                found = run(*given[0], **given[1])
            if loss is not None:
                found, mine = found
                require_same({k: v for k, v in mine.items() if k in eager_state}, gradients, f"{what}: gradients")
                require_same([v for k, v in mine.items() if k not in eager_state], of_inputs, f"{what}: of inputs")
            require_same(found, wanted, f"{what}: results")
            require_same(given, eager_call, f"{what}: arguments afterwards")
            for name, tensor in eager_state.items():
                require_same(state[name].detach(), tensor.detach(), f"{what}: {name} afterwards")
    return exported


def compare_above_autograd(module, args, path, **options):
    """Export a module above autograd, and differentiate what torch's own runner gives, beside the module itself."""
    exported = foregrad.export.export(copy.deepcopy(module), cloned(args), pre_dispatch=True, **options)
    everyone = [exported.to_exported_program().module()]
    if torch.__version__ >= "2.13" or "_set_grad_enabled" not in exported.graph_module.code:
        exported.save(path)
        everyone.append(torch.export.load(path).module())
    else:
        with pytest.raises(ExportError, match=r"torch\.export cannot store this program"):
            exported.save(path)
    for theirs in everyone:
        eager = copy.deepcopy(module)
        for _ in range(2):
            outcomes = []
            for run in (eager, theirs):
                given = cloned(args)
                torch.manual_seed(1)
                result = run(*given)
                run.zero_grad()
                leaves = pytree.tree_leaves(result)
                leaves[0].sum().backward()
                names = sorted(dict(run.named_parameters()))
                outcomes.append(
                    (
                        result,
                        [leaf.requires_grad for leaf in leaves],
                        [t.grad for t in given],
                        {name: run.get_parameter(name).grad for name in names},
                        {name: run.get_buffer(name) for name, _ in sorted(run.named_buffers())},
                    )
                )
            require_same(outcomes[1], outcomes[0], "above autograd")
    return exported
