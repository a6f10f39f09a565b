"""L-6: nodes and errors lead to the user's line."""

import sys

import pytest
import torch

from foregrad.errors import DataDependentError
from foregrad.stack_traces import show_stack, user_stack, where
from helpers import grab, leaf


def traces(graph):
    return {n.target.__name__: n.meta.get("stack_trace", "") for n in graph.graph.nodes if n.op == "call_function"}


def test_forward_nodes_carry_the_line_that_made_them():
    compiled, graphs = grab(lambda x: x.sin().exp())
    compiled(leaf(2))
    for trace in traces(graphs.modules["forward"]).values():
        assert "test_stack_traces.py" in trace and "x.sin().exp()" in trace


def test_backward_nodes_carry_the_line_that_they_differentiate():
    def program(x):
        y = x.sin()  # the line of sine
        return y.exp()

    compiled, graphs = grab(program)
    compiled(leaf(2)).sum().backward()
    assert "the line of sine" in traces(graphs.modules["backward"])["cos.default"]
    tags = {n.meta.get("partitioner_tag") for n in graphs.modules["backward"].graph.nodes if n.op == "call_function"}
    assert tags == {"is_backward"}


def test_a_sum_of_gradients_says_so():
    def program(x):
        y = x.exp()
        return y.sin() * y.cos()

    compiled, graphs = grab(program)
    compiled(leaf(2)).sum().backward()
    assert (
        "Gradient addition node due to multiple use of tensor around:"
        in traces(graphs.modules["backward"])["add.Tensor"]
    )


def test_a_stack_ends_at_the_callers_line():
    stack = user_stack()
    assert where(stack).startswith(f"{__file__}:") and where(stack).endswith("stack = user_stack()")
    assert show_stack(stack).splitlines()[-1].strip() == "stack = user_stack()"


def test_no_stack_is_said_in_words():
    assert where(()) == "an unknown line" and where("") == "an unknown line"


def test_frames_of_torch_are_not_the_users():
    seen = []
    x = leaf(2)
    x.register_hook(lambda g: seen.append(user_stack()))
    (x * 2).sum().backward()
    assert not any("torch/autograd" in code.co_filename for code, _ in seen[0])


@pytest.mark.usefixtures("reads_refused")
def test_an_error_inside_a_helper_names_the_innermost_line_of_the_user():
    def helper(x):
        return x.item()  # here

    with pytest.raises(DataDependentError, match=r"test_stack_traces.py:\d+: return x.item\(\)  # here"):
        grab(lambda x: x * helper(x.sum()))[0](leaf(2))


def test_the_generated_code_shows_in_a_traceback():
    def broken(graph, inputs):
        def run(args):
            raise ValueError("kernel failed")

        run._boxed_call = True
        return run

    import traceback

    import foregrad

    try:
        foregrad.aot_function(torch.sin, broken)(torch.ones(2))
    except ValueError:
        text = "".join(traceback.format_exception(*sys.exc_info()))
        assert "<foregrad program" in text and "inference_graph([" in text
    else:
        pytest.fail("the kernel's own error is not passed on")
