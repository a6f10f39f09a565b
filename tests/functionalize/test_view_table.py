"""Every view operator of ATen has a row in the table of inverses."""

import pytest
import torch

from foregrad.functionalize.view_inverses import INVERSES


def is_view(schema):
    """Whether a result shares the memory of an argument that is not written."""
    arguments = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    returns = [r.alias_info for r in schema.returns if r.alias_info is not None]
    return bool(arguments and returns) and not any(a.is_write for a in arguments)


def view_operators():
    """The view operators that reach the recorder: a composite one arrives as those that it is made of."""
    dispatched = set(torch._C._dispatch_get_all_op_names())
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        if not name.startswith("aten::") or name not in dispatched or not is_view(schema):
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            yield getattr(packet, schema.overload_name or "default")


VIEW_OPERATORS = sorted(view_operators(), key=str)


@pytest.mark.parametrize("op", VIEW_OPERATORS, ids=str)
def test_a_view_operator_has_a_row(op):
    """M-1"""
    assert op in INVERSES


def test_the_schemas_were_found():
    assert {torch.ops.aten.view.default, torch.ops.aten.split.Tensor, torch.ops.aten.unfold.default} <= set(
        VIEW_OPERATORS
    )
