"""L-1, L-2: names of graphs, and graphs shown to those who ask."""

import logging

import pytest
from torch._logging import set_logs

import foregrad
from helpers import leaf, nop, plain


@pytest.fixture
def shown():
    """What the loggers of graphs print."""
    set_logs(aot_joint_graph=True, aot_graphs=True)
    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Keep()
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if "__aot_joint_graph" in name or "__aot_graphs" in name
    ]
    for logger in loggers:
        logger.addHandler(handler)
    yield messages
    for logger in loggers:
        logger.removeHandler(handler)
    set_logs()


def names_while_compiling(fn, *args):
    seen = []

    def compiler(graph, inputs):
        seen.append((foregrad.get_aot_graph_name(), foregrad.get_aot_compilation_context()))
        return foregrad.make_boxed_func(graph.forward)

    compiled = foregrad.aot_function(fn, compiler)
    result = compiled(*args)
    if result.requires_grad:
        result.sum().backward()
    return compiled.config.aot_id, seen


def test_a_graph_is_named_after_model_number_and_phase():
    """L-1"""
    foregrad.set_model_name("demo")
    try:
        number, seen = names_while_compiling(lambda x: x.sin(), leaf(2))
    finally:
        foregrad.set_model_name("model")
    (forward, context), (backward, _) = seen
    assert forward.startswith(f"demo__{number}_forward_") and backward.startswith(f"demo__{number}_backward_")
    assert context[:2] == ([f"{number}_forward"], "demo")
    assert forward.endswith(str(context[2]))


def test_the_count_grows_with_each_phase():
    """L-1"""
    _, first = names_while_compiling(lambda x: x.sin(), leaf(2))
    _, second = names_while_compiling(lambda x: x.sin(), plain(2))
    counts = [context[2] for _, context in first + second]
    assert counts == sorted(set(counts)) and "_inference_" in second[0][0]


def test_outside_a_compilation_nothing_is_being_compiled():
    """L-1"""
    assert foregrad.get_aot_compilation_context()[:2] == ([], "model")
    assert foregrad.get_graph_being_compiled is foregrad.get_aot_graph_name


def test_graphs_are_shown_under_their_titles(shown):
    """L-2"""
    foregrad.aot_function(lambda x: x.sin(), nop)(leaf(2)).sum().backward()
    foregrad.aot_function(lambda x: x.sin(), nop)(plain(2))
    text = "\n".join(shown)
    for title in ("Joint graph", "Forward graph", "Backward graph"):
        assert title in text
    assert "sin" in text and "cos" in text


def test_graphs_are_not_shown_where_the_log_is_off(shown):
    """L-2"""
    foregrad.aot_function(lambda x: x.sin(), nop, enable_log=False)(leaf(2)).sum().backward()
    assert shown == []
