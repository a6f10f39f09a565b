"""torch's own checks of gradients on some compiled operators; `make sweep` runs them on all (tests/sweep)."""

import pytest

SAMPLE = """
    mul div.no_rounding_mode pow atan2 where clamp logsumexp cumprod prod std amax sort index_select gather
    scatter_add index_add as_strided as_strided_copy diagonal unfold expand squeeze stack split matmul addmm einsum
    linalg.solve linalg.svdvals linalg.eigvalsh linalg.slogdet linalg.cholesky linalg.qr
    nn.functional.conv2d nn.functional.layer_norm nn.functional.gelu nn.functional.dropout nn.functional.cross_entropy
    nn.functional.embedding nn.functional.max_pool2d nn.functional.scaled_dot_product_attention
    _native_batch_norm_legit
"""


@pytest.mark.filterwarnings("ignore")  # operators warn about themselves, in eager too
@pytest.mark.parametrize("name", SAMPLE.split())
def test_the_gradients_of_an_operator(name):
    """J-10: `gradcheck` and `gradgradcheck` pass on the compiled operator as they do in eager."""
    from sweep.gradients import complaints, differentiable_operators  # the database takes seconds to import

    assert complaints(differentiable_operators()[name], limit=1) == []
