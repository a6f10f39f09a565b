"""Operators without an abstract kernel, of which the real one is asked: losses with lists of lengths."""

import pytest
import torch
from torch.nn import functional as F

import foregrad
from foregrad import check
from foregrad.errors import DataDependentError
from helpers import nop


def scores():
    return torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()


def loss(lengths, wanted, **options):
    return lambda x, y: F.ctc_loss(x.log_softmax(-1), y, lengths, wanted, **{"reduction": "sum", **options})


@pytest.mark.parametrize("wanted", [(3, 2), (3, 3), (1, 0)])
@pytest.mark.parametrize("options", [{}, {"zero_infinity": True}, {"reduction": "none"}, {"reduction": "mean"}])
def test_lengths_that_are_numbers_are_no_data(wanted, options):
    check(loss((8, 7), wanted, **options), scores(), torch.tensor([[1, 2, 3], [3, 4, 5]]))


def test_targets_one_after_another():
    check(loss((8, 7), (3, 2)), scores(), torch.tensor([1, 2, 3, 4, 5]))


@pytest.mark.parametrize("lengths", [((9, 7), (3, 2)), ((8, 7), (4, 2)), ((8,), (3, 2))])
def test_lengths_that_do_not_fit_have_the_error_of_eager(lengths):
    x, y = scores(), torch.tensor([[1, 2, 3], [3, 4, 5]])
    with pytest.raises(RuntimeError) as eager:
        loss(*lengths)(x, y)
    with pytest.raises(RuntimeError) as compiled:
        foregrad.aot_function(loss(*lengths), nop)(x, y)
    assert str(compiled.value).splitlines()[0] == str(eager.value).splitlines()[0]


@pytest.mark.usefixtures("reads_refused")
def test_lengths_that_are_tensors_are_data():
    program = foregrad.aot_function(loss(torch.tensor([8, 7]), torch.tensor([3, 2])), nop)
    with pytest.raises(DataDependentError):
        program(scores(), torch.tensor([[1, 2, 3], [3, 4, 5]]))
