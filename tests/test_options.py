"""L-7, F-13: defaults, and the frozen value that carries them."""

import dataclasses

import pytest

import foregrad
from foregrad import AOTConfig
from foregrad.errors import ConfigError, IgnoredOptionWarning
from foregrad.options import Config, next_aot_id
from helpers import nop


def config(**fields):
    defaults = {
        "fw_compiler": nop,
        "bw_compiler": nop,
        "partition_fn": None,
        "decompositions": {},
        "num_params_buffers": 0,
        "aot_id": 0,
        "keep_inference_input_mutations": False,
    }
    return AOTConfig(**{**defaults, **fields})


def test_the_defaults_are_those_of_the_rule():
    """L-7"""
    fresh = Config()
    assert not fresh.functionalize_rng_ops and not fresh.debug_assert and not fresh.verify
    assert fresh.static_weight_shapes and fresh.cse and fresh.view_replay_for_aliased_outputs
    assert fresh.max_dist_from_bw == 1000 and fresh.activation_memory_budget == 1.0
    assert fresh.ban_recompute_used_far_apart and fresh.ban_recompute_reductions
    assert not fresh.recompute_views and not fresh.aggressive_recomputation
    assert not fresh.unlift_effect_tokens and not fresh.enable_autograd_cache
    assert fresh.max_specializations == 32 and fresh.fallback == "error"


def test_an_option_is_patched_for_a_block():
    """L-7"""
    with foregrad.config.patch(cse=False, max_specializations=3):
        assert not foregrad.config.cse and foregrad.config.max_specializations == 3
    assert foregrad.config.cse and foregrad.config.max_specializations == 32
    with pytest.raises(ValueError, match="on purpose"), foregrad.config.patch(cse=False):
        raise ValueError("on purpose")
    assert foregrad.config.cse


def test_an_option_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"no option 'sce'.*cse"), foregrad.config.patch(cse=False, sce=True):
        pass
    assert foregrad.config.cse
    with pytest.raises(ConfigError, match=r"no option 'sce'.*cse"):
        foregrad.config.sce = True


@pytest.mark.parametrize("name", ["enable_autograd_cache", "strict_autograd_cache", "recompute_views"])
def test_an_option_without_effect_says_so_when_it_is_set(name):
    """L-7"""
    with (
        pytest.warns(IgnoredOptionWarning, match=f"config.{name} has no effect"),
        foregrad.config.patch(**{name: True}),
    ):
        assert foregrad.config.copy() == foregrad.config
    setattr(foregrad.config, name, False)  # the default: there is nothing to say


def test_options_are_read_when_a_function_is_wrapped():
    """L-7: they travel as one frozen value from there."""
    with foregrad.config.patch(max_specializations=1, fallback="eager"):
        compiled = foregrad.aot_function(lambda x: x * 2, nop)
    assert compiled.config.options.max_specializations == 1 and compiled.config.options.fallback == "eager"
    assert foregrad.aot_function(lambda x: x, nop).config.options.max_specializations == 32


def test_the_fields_of_a_compilation_stand_in_the_order_of_the_rule():
    """F-13"""
    assert [field.name for field in dataclasses.fields(AOTConfig)][:15] == [
        "fw_compiler",
        "bw_compiler",
        "partition_fn",
        "decompositions",
        "num_params_buffers",
        "aot_id",
        "keep_inference_input_mutations",
        "is_export",
        "no_tangents",
        "dynamic_shapes",
        "aot_autograd_arg_pos_to_source",
        "inference_compiler",
        "enable_log",
        "pre_dispatch",
        "cache_key",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().aot_id = 3


def test_pre_dispatch_is_for_export_only():
    """F-13"""
    with pytest.raises(ConfigError, match=r"Can only have pre_dispatch IR for export\."):
        config(pre_dispatch=True)
    assert config(pre_dispatch=True, is_export=True).pre_dispatch


def test_sources_of_arguments_must_be_distinct():
    """F-13"""
    with pytest.raises(AssertionError):
        config(aot_autograd_arg_pos_to_source=["a", "a"])
    config(aot_autograd_arg_pos_to_source=["a", "b"])


def test_numbers_of_graphs_grow():
    """F-13: taken when a function is wrapped."""
    first, between, second = foregrad.aot_function(len, nop), next_aot_id(), foregrad.aot_function(len, nop)
    assert first.config.aot_id < between < second.config.aot_id


def test_a_fallback_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"'error' or 'eager', not 'maybe'"):
        foregrad.aot_function(lambda x: x, nop, fallback="maybe")


def test_verification_is_on_in_the_tests():
    assert foregrad.config.verify
    assert foregrad.aot_function(lambda x: x * 2, nop).config.options.verify
