"""F-5: the contract with the user's compilers."""

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import CompilerError
from helpers import grab, leaf, nop, plain


def test_a_compiler_gets_a_graph_and_abstract_examples():
    """F-5"""
    compiled, graphs = grab(lambda x, k: x * k)
    compiled(leaf(2, 3), 4)
    tensor, number = graphs.examples["forward"]
    assert tensor.shape == (2, 3) and type(tensor).__name__ == "FakeTensor" and number == 4
    assert isinstance(graphs.modules["forward"], torch.fx.GraphModule)


def test_a_boxed_callable_gets_one_list_that_it_may_empty():
    """F-5"""
    sizes = []

    def compiler(graph, inputs):
        def run(args):
            sizes.append(len(args))
            given = list(args)
            args.clear()
            return graph(*given)

        run._boxed_call = True
        return run

    x = leaf(2)
    foregrad.aot_function(lambda x: x.sin(), compiler)(x).sum().backward()
    assert sizes == [1, 2] and torch.allclose(x.grad, plain(2).cos())


def test_an_unboxed_forward_is_adapted_silently_and_a_backward_with_a_warning():
    """F-5"""
    x = leaf(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = foregrad.aot_function(lambda x: x.sin(), lambda graph, inputs: graph.forward)(x)
        assert not caught
        y.sum().backward()
    assert any("boxed arguments" in str(w.message) for w in caught) and torch.allclose(x.grad, plain(2).cos())


@pytest.mark.parametrize("wrap", [lambda r: r, list, tuple, lambda r: r[0]], ids=["as it is", "list", "tuple", "bare"])
def test_a_tuple_a_list_or_a_single_value_may_be_returned(wrap):
    """F-5"""

    def compiler(graph, inputs):
        return foregrad.make_boxed_func(lambda *args: wrap(graph(*args)))

    compiled = foregrad.aot_function(lambda x: x * 2, compiler)
    for _ in range(3):
        assert compiled(plain(2)).tolist() == [2, 4]


def test_functions_and_compilers_are_made_boxed():
    """F-5"""
    add = foregrad.make_boxed_func(lambda a, b: a + b)
    assert add([1, 2]) == 3 and add._boxed_call
    compiler = foregrad.make_boxed_compiler(lambda graph, inputs: graph.forward)
    assert foregrad.aot_function(lambda x: x + 1, compiler)(plain(1)).item() == 2


def test_a_boxed_result_of_a_compiler_is_left_alone():
    """A compiler may be made boxed whatever it gives: twice, or one that boxes by itself."""

    def boxing(graph, inputs):
        return foregrad.make_boxed_func(graph.forward)

    for compiler in (boxing, foregrad.make_boxed_compiler(boxing)):
        made = foregrad.make_boxed_compiler(compiler)
        x = leaf(3)
        foregrad.aot_function(lambda x: x.sin(), made)(x).sum().backward()
        assert torch.equal(x.grad, leaf(3).detach().cos())
    kept = foregrad.make_boxed_func(len)
    assert foregrad.make_boxed_compiler(lambda graph, inputs: kept)(None, ()) is kept


def test_a_compiler_that_draws_random_numbers_does_not_shift_the_stream():
    """F-12"""

    def compiler(graph, inputs):
        torch.rand(7)
        return foregrad.make_boxed_func(graph.forward)

    torch.manual_seed(2)
    ours = foregrad.aot_function(lambda x: x * torch.rand(2), compiler)(plain(2))
    torch.manual_seed(2)
    assert torch.equal(ours, plain(2) * torch.rand(2))


@pytest.mark.parametrize(("phase", "position"), [("forward", 0), ("backward", 1), ("inference", 2)])
def test_a_compiler_that_raises(phase, position):
    """F-5"""

    def broken(graph, inputs):
        raise KeyError("no such kernel")

    compilers = [nop, nop, nop]
    compilers[position] = broken
    compiled = foregrad.aot_function(lambda x: x.sin(), compilers[0], compilers[1], inference_compiler=compilers[2])
    with pytest.raises(
        CompilerError, match=rf"compiler of the {phase} graph raised KeyError.*no such kernel"
    ) as caught:
        compiled(plain(2)) if phase == "inference" else compiled(leaf(2)).sum().backward()
    assert isinstance(caught.value.__cause__, KeyError) and "make_boxed_func(graph.forward)" in str(caught.value)


@pytest.mark.parametrize(("phase", "position"), [("forward", 0), ("backward", 1), ("inference", 2)])
def test_a_compiler_that_returns_no_callable(phase, position):
    """F-5"""
    compilers = [nop, nop, nop]
    compilers[position] = lambda graph, inputs: 7
    compiled = foregrad.aot_function(lambda x: x.sin(), compilers[0], compilers[1], inference_compiler=compilers[2])
    with pytest.raises(
        CompilerError, match=rf"compiler of the {phase} graph returned a int; it must return a function"
    ):
        compiled(plain(2)) if phase == "inference" else compiled(leaf(2)).sum().backward()


@pytest.mark.parametrize(("phase", "position"), [("forward", 0), ("backward", 1), ("inference", 2)])
def test_a_compiled_graph_that_returns_too_many_values(phase, position):
    """F-5"""

    def compiler(graph, inputs):
        return foregrad.make_boxed_func(lambda *args: [*graph(*args), None])

    compilers = [nop, nop, nop]
    compilers[position] = compiler
    compiled = foregrad.aot_function(lambda x: x * 2, compilers[0], compilers[1], inference_compiler=compilers[2])
    with pytest.raises(CompilerError, match=rf"compiled {phase} graph returned 2 values where the graph has 1 outputs"):
        compiled(plain(2)) if phase == "inference" else compiled(leaf(2)).sum().backward()


def test_an_error_of_the_compiled_code_is_passed_on():
    """Z"""

    def compiler(graph, inputs):
        def run(*args):
            raise MemoryError("out of it")

        return foregrad.make_boxed_func(run)

    with pytest.raises(MemoryError, match="out of it"):
        foregrad.aot_function(lambda x: x * 2, compiler)(plain(2))


def test_a_call_after_a_failed_compilation_tries_again():
    """F-5"""
    tries = []

    def compiler(graph, inputs):
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not yet")
        return foregrad.make_boxed_func(graph.forward)

    compiled = foregrad.aot_function(lambda x: x * 2, compiler)
    with pytest.raises(CompilerError):
        compiled(plain(2))
    assert compiled(plain(2)).tolist() == [2, 4] and len(compiled.specializations) == 1
