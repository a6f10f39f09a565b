"""The public records and helpers."""

import pytest
import torch

import foregrad
from foregrad import compat
from foregrad._torch import FakeTensorMode
from helpers import leaf, nop, plain
from subclass_pairs import Pair, pair


def facts(program, *args):
    f = foregrad.aot_function(program, nop)
    f(*args)
    return f.specializations[-1].metadata


def test_names():
    """T-11: everything is where it is looked for"""
    for name in compat.__all__:
        assert callable(getattr(compat, name))
    with pytest.raises(AttributeError):
        compat.nothing


def test_records_of_inputs():
    """T-2, T-3"""
    metas = facts(lambda k, x: x * k, plain(2), Pair(pair(2), pair(2))).subclass_inp_meta
    assert metas[0] == 0
    record = metas[1]
    assert (record.flat_tensor_start_idx, record.arg_count, record.meta) == (1, 4, "std")
    assert record.attrs["q"].flat_tensor_start_idx == 3 and record.subclass_type is Pair
    assert record.outer_size == (2,) and record.outer_stride == (1,)
    built = record.creation_fn([plain(2) * n for n in range(5)], is_runtime=True)
    assert built.q.q.tolist() == [4, 8] and not built.requires_grad


def test_records_of_results_and_tangents():
    """T-3, V-7"""
    metadata = facts(lambda x, w: (x * 2, w * 3), pair(2, grad=True), leaf(2))
    assert [getattr(m, "arg_count", 1) for m in metadata.subclass_fw_graph_out_meta] == [2, 1]
    assert metadata.subclass_fw_graph_out_meta[1] == 2
    assert metadata.subclass_tangent_meta[0].arg_count == 2
    assert metadata.traced_tangent_metas == [(["p", "q"], "std"), None]
    assert [info.requires_grad for info in metadata.input_info] == [True, True]


def test_autograd_state_is_copied_while_recording():
    """T-2"""
    record = facts(lambda x: x * 2, pair(2, grad=True)).subclass_inp_meta[0]
    assert record.creation_fn([plain(2), plain(2)], is_runtime=False).requires_grad
    with pytest.raises(AssertionError, match="fake"):
        compat.create_subclass_meta([pair(2)])


def test_unwrap():
    """T-11"""
    p = pair(1)
    primals, tangents = compat.unwrap_tensor_subclasses(([p, 3], [p]), is_joint_structure=True)
    assert primals == [p.p, p.q, 3] and len(tangents) == 2
    for wrong in ([p], ([p], [p], [p]), (p, p)):
        with pytest.raises(AssertionError):
            compat.unwrap_tensor_subclasses(wrong, is_joint_structure=True)


def test_wrap():
    """T-4, T-11: what is saved stays plain, and a wrong count is refused"""
    with FakeTensorMode():
        metas = compat.create_subclass_meta([pair(2), 5])
    values = [plain(2), plain(2), 5, plain(1)]
    wrapped = compat.wrap_tensor_subclasses(values, subclass_metas=metas, num_fw_outs_saved_for_bw=1)
    assert type(wrapped[0]) is Pair and wrapped[1] == 5 and wrapped[2] is values[3]
    with pytest.raises(AssertionError, match="Expected the number actual unwrapped-subclass outputs"):
        compat.wrap_tensor_subclasses(values, subclass_metas=metas)


def test_wrap_joint():
    """T-11: each part with its own records"""
    metadata = facts(lambda x, w: w - x, pair(2, grad=True), leaf(2))
    flat = [plain(2), plain(2), plain(2)], [plain(2), plain(2)]
    primals, tangents = compat.wrap_tensor_subclasses_maybe_joint(flat, is_joint_structure=True, meta=metadata)
    assert [type(t) for t in (*primals, *tangents)] == [Pair, torch.Tensor, Pair]
    alone = compat.wrap_tensor_subclasses_maybe_joint(flat[0], is_joint_structure=False, meta=metadata)
    assert [type(t) for t in alone] == [Pair, torch.Tensor]


def test_questions():
    """T-11"""
    metadata = facts(lambda x: x * 2, plain(2))
    assert not compat.requires_subclass_dispatch([plain(2)], metadata)
    assert compat.requires_subclass_dispatch([[pair(2)]], metadata)
    assert compat.requires_subclass_dispatch([], facts(lambda x: Pair(x, x * 2) * 2, plain(2)))
    assert compat.get_types_for_subclass(Pair(pair(2), plain(2))) == ["Tensor"] * 3


def test_records_that_describe_a_recording():
    """T-5, V-12"""
    metadata = facts(lambda x: x * 2, plain(2))
    meta = compat.SubclassMeta(fw_metadata=metadata, grad_input_metas=[0])
    info = compat.SubclassTracingInfo(len, [plain(2)], meta)
    assert info.maybe_subclass_meta.fw_metadata is metadata and info.plain_tensor_trace_fn is len
