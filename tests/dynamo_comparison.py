"""Compare a program of `dynamo_programs` behind `torch.compile` with eager, or all of them.

python tests/dynamo_comparison.py --compiler eager [--mode dynamic] [NAME ...]
"""

import argparse
import collections
import copy
import sys
import time
import warnings

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import foregrad
from dynamo_programs import MODELS, PROGRAMS
from foregrad.errors import ForegradError

MODES = {"default": None, "dynamic": True, "static": False}


def state(args, module):
    """What a step may leave behind, beside its results."""
    held = [arg for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
    named = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = [tensor.grad for tensor in (*held, *named)]
    kept = [arg for arg in tree_leaves(args) if not isinstance(arg, torch.Tensor)]
    return [*held, *named, *gradients, *kept, torch.get_rng_state()]


def step(program, args, module, seed):
    """Results, then everything that a step has changed; each as a copy."""
    torch.manual_seed(seed)
    result = tree_leaves(program(*args))
    ends = [r for r in result if isinstance(r, torch.Tensor) and r.requires_grad]
    if ends:
        sum((end.float() * (i + 1)).square().sum() for i, end in enumerate(ends)).backward()
    every = [*result, *state(args, module)]
    return [e.detach().clone() if isinstance(e, torch.Tensor) else e for e in every]


def unlike(a, b, exact):
    """How two values differ, if they do."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{a.dtype} {tuple(a.shape)} is {b.dtype} {tuple(b.shape)}"
        rtol, atol = (1e-5, 1e-6) if exact else (1e-3, 1e-4)
        if torch.equal(a, b) or torch.allclose(a, b, rtol, atol, equal_nan=True):
            return None
        return f"values by {(a - b).abs().max().item() if a.dtype is not torch.bool else 1:.3g}"
    return None if type(a) is type(b) and a == b else f"{a!r} is {b!r}"


def refusal(error):
    """A refusal of Foregrad's in an error of Dynamo's."""
    while error is not None:
        inner = getattr(error, "inner_exception", None) or error
        if isinstance(inner, ForegradError):
            return inner
        error = error.__cause__
    return None


def difference(name, mode, compiler):
    """ "equal", "refused by name: ...", or what is wrong."""
    torch.compiler.reset()
    if name in PROGRAMS:
        program, calls = PROGRAMS[name]
        other = program
    else:
        make, calls = MODELS[name]
        torch.manual_seed(0)
        program = make()
        other = copy.deepcopy(program)
    options = {"fallback_random": True} if compiler == "inductor" else None
    compiled = torch.compile(other, backend=foregrad.backend(compiler, options=options), dynamic=MODES[mode])
    both = []
    for _ in range(2):
        torch.manual_seed(1)
        both.append(calls())
    for seed, (ours, theirs) in enumerate(zip(*both, strict=True)):
        expected = step(program, theirs, program, seed)
        try:
            found = step(compiled, ours, other, seed)
        except Exception as error:
            refused = refusal(error)
            if refused is None:
                return f"call {seed} raised {type(error).__name__}: {str(error)[:500]}"
            return f"refused by name: {type(refused).__name__}: {refused}"
        if len(expected) != len(found):
            return f"call {seed} gives {len(found)} values, {len(expected)} in eager"
        exact = compiler == "eager" and name in PROGRAMS
        for i, pair in enumerate(zip(expected, found, strict=True)):
            said = unlike(*pair, exact)
            if said is not None:
                return f"call {seed} differs in value {i}: {said}"
    return "equal"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs and models; all of them if none is named")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--compiler", choices=["eager", "inductor"], default="eager")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    counted: collections.Counter[str] = collections.Counter()
    for name in asked.names or [*PROGRAMS, *MODELS]:
        for mode in asked.mode or MODES:
            start = time.perf_counter()
            said = difference(name, mode, asked.compiler)
            kind = "refused" if said.startswith("refused") else "equal" if said == "equal" else "WRONG"
            counted[kind] += 1
            print(f"{name}, {mode}: {said} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counted.items()))
    return 1 if counted["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
