"""Several threads: first compiles at the same time, calls while another thread records, readers of what is recorded."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

import foregrad
from foregrad.errors import CaptureError, UnsupportedError
from helpers import FORKS, leaf, nop, plain

THREADS = 6


def together(*work):
    """Run functions in threads that start at the same moment; the first error is raised here."""
    barrier = threading.Barrier(len(work))

    def start(function):
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(start, function) for function in work]]


def gradient(run, *shape):
    x = leaf(*shape)
    run(x).sum().backward()
    return x.grad


def polynomial(x):
    return x.sin() * x + x.exp()


def with_a_write(x):
    y = x * 2
    y[0].add_(1)
    return y.cos()


def with_a_branch(x):
    return x.tanh() if x.shape[0] > 2 else x.sigmoid()


def random(x):
    return torch.dropout(x, 0.5, True) * 0 + x


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_callable_is_first_called_by_all_threads(dynamic):
    """J-7"""
    for program in (polynomial, with_a_write, with_a_branch, random):
        compiled = foregrad.aot_function(program, nop, dynamic=dynamic)
        shapes = [(2,), (3,), (2, 2)] * 2
        found = together(*(lambda s=s: gradient(compiled, *s) for s in shapes))
        for shape, ours in zip(shapes, found, strict=True):
            torch.testing.assert_close(ours, gradient(program, *shape))
        assert len(compiled.specializations) <= 3


def test_many_callables_are_first_called_at_once():
    programs = [polynomial, with_a_write, with_a_branch, random, polynomial, with_a_write]
    compiled = [foregrad.aot_function(program, nop) for program in programs]
    for _ in range(3):
        found = together(*(lambda f=f: gradient(f, 3) for f in compiled))
        for program, ours in zip(programs, found, strict=True):
            torch.testing.assert_close(ours, gradient(program, 3))
    assert [len(f.specializations) for f in compiled] == [1] * 6


def test_threads_keep_their_modes_to_themselves():
    """F-2: grad mode, autocast and inference mode belong to a thread."""
    compiled = foregrad.aot_function(lambda x: x @ x, nop)

    def trains():
        return [compiled(leaf(3, 3)).requires_grad for _ in range(20)]

    def infers():
        with torch.no_grad():
            return [compiled(leaf(3, 3)).requires_grad for _ in range(20)]

    def casts():
        with torch.autocast("cpu", torch.bfloat16):
            return [compiled(leaf(3, 3)).dtype is torch.bfloat16 for _ in range(20)]

    def stands_still():
        with torch.inference_mode():
            return [compiled(leaf(3, 3)).is_inference() for _ in range(20)]

    assert together(trains, infers, casts, stands_still) == [[True] * 20, [False] * 20, [True] * 20, [True] * 20]
    assert len(compiled.specializations) == 4


class Network(nn.Module):
    """Parameters, a buffer that is written, one that is replaced, a custom function, and an inner list of layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        x = self.norm(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x.sum() + self.mean.sum()


class Watch:
    """A thread that looks at a module all the time, as an optimizer, a logger or a checkpoint writer would."""

    def __init__(self, module, with_buffers):
        self.module = module
        self.with_buffers = with_buffers
        self.found = []
        self.looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self):
        expected = [name for name, _ in self.module.named_parameters()]
        while not self._stop.is_set():
            tensors = dict(self.module.named_parameters())
            if list(tensors) != expected:
                self.found.append(list(tensors))
            buffers = dict(self.module.named_buffers()) if self.with_buffers else {}
            for name, tensor in [*tensors.items(), *buffers.items()]:
                for seen in (tensor, tensor.grad if tensor.is_leaf else None):
                    if seen is not None and is_fake(seen):
                        self.found.append(name)
            self.looks += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


class Fixed(Network):
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.norm(x).sum()


def test_a_reader_never_meets_an_abstract_parameter_gradient_or_buffer():
    """F-9: parameters are not swapped, and what is written in place is written to a twin."""
    module = Fixed()
    with Watch(module, with_buffers=True) as watch:
        for n in range(2, 6):
            foregrad.aot_module(module, nop)(torch.randn(n, 4)).backward()
    assert watch.looks > 10 and watch.found == []


def test_a_reader_of_parameters_beside_buffers_that_are_replaced():
    module = Network()
    with Watch(module, with_buffers=False) as watch:
        for n in range(2, 6):
            foregrad.aot_module(module, nop)(torch.randn(n, 4)).backward()
    assert watch.looks > 10 and watch.found == [] and not is_fake(module.mean)


def test_one_module_is_recorded_and_called_by_all_threads():
    """Buffers that are replaced are never taken for another recording's, nor do they stay abstract."""
    module = Network()
    shared = foregrad.aot_module(module, nop)
    own = [foregrad.aot_module(module, nop) for _ in range(THREADS)]

    def work(i):
        for n in range(2, 6):
            own[i](torch.ones(n, 4)).backward()
            shared(torch.ones(n, 4)).backward()

    together(*(lambda i=i: work(i) for i in range(THREADS)))
    assert not is_fake(module.mean)  # now that no thread records any more
    assert not any(is_fake(t) or (t.grad is not None and is_fake(t.grad)) for t in module.parameters())
    before = module.mean
    shared(torch.ones(3, 4))
    expected = 0.9 * before + 0.1 * 0
    assert module.mean is not before
    torch.testing.assert_close(module.mean, expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_shared_parameters_add_up():
    """Backward in several threads, on one module: every contribution arrives."""
    module = nn.Linear(3, 1, bias=False)
    compiled = foregrad.aot_module(module, nop)
    barrier = threading.Barrier(THREADS)

    def work():
        barrier.wait()
        gradients = []
        for _ in range(10):
            (g,) = torch.autograd.grad(compiled(torch.ones(2, 3)).sum(), module.weight)
            gradients.append(g)
        return sum(gradients)

    total = sum(together(*[work] * THREADS))
    torch.testing.assert_close(total, torch.full((1, 3), 2.0 * 10 * THREADS))


def test_a_backward_runs_in_another_thread_than_its_forward():
    compiled = foregrad.aot_function(lambda x: (x.sin(), x.cos()), nop)
    pairs = [(x, compiled(x)) for x in (leaf(3) for _ in range(THREADS))]
    together(*(lambda y=y: y[0].sum().backward() for _, y in pairs))
    for x, _ in pairs:
        torch.testing.assert_close(x.grad, plain(3).cos())


def test_facts_that_another_thread_changes_are_tried_again():
    """A guard that fails right after the recording is not the program's fault."""

    class Switch(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x * 3

    flips, module = [], Switch()

    def compiler(graph, inputs):
        if not flips:  # once, after it was recorded and before it is called
            flips.append(1)
            thread = threading.Thread(target=module.eval)
            thread.start()
            thread.join()
        return nop(graph, inputs)

    compiled = foregrad.aot_module(module, compiler)
    assert compiled(plain(2)).tolist() == [3, 6]
    module.train()
    assert compiled(plain(2)).tolist() == [2, 4]


def test_anomaly_mode_is_not_touched_by_recordings():
    """It is one for all threads."""
    together(*[lambda: gradient(foregrad.aot_function(polynomial, nop), 3)] * THREADS)
    assert torch.is_anomaly_check_nan_enabled() and not torch.is_anomaly_enabled()


def test_a_program_that_computes_in_threads_of_its_own_is_refused():
    def program(x):
        with ThreadPoolExecutor(1) as pool:
            a, b = pool.map(torch.sin, [x, x * 2])
        return a + b

    with pytest.raises(CaptureError, match="in another thread"):
        foregrad.aot_function(program, nop)(leaf(3))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * ctx.saved_tensors[0]


@pytest.mark.parametrize("function", [Double, Square])
def test_a_backward_inside_never_leaves_an_abstract_gradient_on_a_parameter(function):
    class Inner(nn.Linear):
        def forward(self, x):
            loss = (function.apply(self.weight) * x).sum()
            loss.backward()
            return loss.detach()

    module = Inner(3, 2)
    with pytest.raises(UnsupportedError, match="finds by itself"):
        foregrad.aot_module(module, nop)(plain(2, 3))
    assert module.weight.grad is None


# ------------------------------------------------------------------------------------------------------- fork
def in_a_fork(function):
    """Run a function in a forked process; gives what it returns, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(function()).encode())
        finally:
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise TimeoutError("the forked process hangs")
        time.sleep(0.01)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.skipif(not FORKS, reason="torch itself cannot")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_compiled_callable_works_in_a_forked_process():
    compiled = foregrad.aot_function(polynomial, nop)
    gradient(compiled, 3)
    module = nn.Linear(3, 1)
    layer = foregrad.aot_module(module, nop)
    layer(plain(2, 3)).sum().backward()

    def child():
        old, new = gradient(compiled, 3), gradient(compiled, 5)
        module.weight.grad = None
        layer(plain(2, 3)).sum().backward()
        return [old.tolist() == gradient(polynomial, 3).tolist(), new.tolist() == gradient(polynomial, 5).tolist()] + [
            module.weight.grad.tolist()
        ]

    assert in_a_fork(child) == "[True, True, [[5.0, 7.0, 9.0]]]"


@pytest.mark.skipif(not FORKS, reason="torch itself cannot")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_while_another_thread_compiles():
    """The lock of a thread that does not exist in the new process is open there."""
    started, finish = threading.Lock(), threading.Lock()  # a program may not set an event that it finds

    def pause():
        if started.locked():
            started.release()
        if finish.acquire(timeout=30):
            finish.release()

    def slow(graph, inputs):
        pause()
        return nop(graph, inputs)

    def recorded(x):
        pause()
        return x * 2

    for compiled in (foregrad.aot_function(polynomial, slow), foregrad.aot_function(recorded, nop)):
        started.acquire()
        finish.acquire()
        thread = threading.Thread(target=lambda f=compiled: f(leaf(3)))
        thread.start()
        assert started.acquire(timeout=30)

        def child(compiled=compiled):
            finish.release()
            return compiled(leaf(3)).shape

        try:
            assert in_a_fork(child) == "torch.Size([3])"
        finally:
            finish.release()
            thread.join()
            started.release()
