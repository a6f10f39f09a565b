"""Sparse tensors: gradients of embeddings, products of matrices, and what is refused."""

import pytest
import torch
from torch import nn

import foregrad
from foregrad import check
from foregrad.errors import DataDependentError, UnsupportedError
from helpers import leaf, nop, plain

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
INDICES = torch.tensor([[0, 1, 2, 2], [1, 0, 3, 3]])  # the last two at one place


def coo(values, indices=INDICES):
    return torch.sparse_coo_tensor(indices, values, (4, 4))


PRODUCTS = {
    "sparse.mm": lambda v, x: torch.sparse.mm(coo(v), x),
    "matmul": lambda v, x: coo(v) @ x,
    "coalesced": lambda v, x: torch.sparse.mm(coo(v).coalesce(), x),
    "transposed": lambda v, x: coo(v).t() @ x,
    "addmm": lambda v, x: torch.sparse.addmm(x, coo(v), x),
    "vector": lambda v, x: coo(v) @ x[:, 0],
    "sum": lambda v, x: torch.sparse.sum(coo(v), 1).to_dense() @ x,
    "dense": lambda v, x: coo(v).to_dense() @ x,
}


@pytest.mark.parametrize("program", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("requires_grad", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_sparse_matrices(program, requires_grad):
    values, dense = plain(4).requires_grad_(requires_grad[0]), plain(4, 3).requires_grad_(requires_grad[1])
    check(program, values, dense)


def test_a_sparse_matrix_of_which_the_parts_are_arguments():
    compiled = foregrad.aot_function(lambda i, v, x: coo(v, i) @ x, nop)
    x = leaf(4, 3)
    for indices in (INDICES.clone(), INDICES.flip(0).contiguous()):
        assert torch.equal(compiled(indices, plain(4), x), coo(plain(4), indices) @ x)
    assert len(compiled.specializations) == 1


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_with_sparse_gradients_train_as_in_eager(layer):
    trained = []
    for compile in (lambda module: module, lambda module: foregrad.aot_module(module, nop)):
        torch.manual_seed(0)
        model = nn.Sequential(layer(10, 4, sparse=True), nn.Linear(4, 2))
        called = compile(model)
        optimizers = torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())
        for step in range(3):
            tokens = torch.randint(0, 10, (3, 5), generator=torch.Generator().manual_seed(step))
            called(tokens).square().sum().backward()
            assert model[0].weight.grad.is_sparse
            trained.append(model[0].weight.grad.coalesce().values().clone())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained.append([parameter.detach() for parameter in model.parameters()])
    half = len(trained) // 2
    assert all(map(torch.equal, trained[: half - 1], trained[half:-1]))
    assert all(map(torch.equal, trained[half - 1], trained[-1]))


@pytest.mark.parametrize(
    "program",
    [
        lambda v: v.new_zeros(coo(v).coalesce().values().shape),
        lambda v: v.view(2, 2).to_sparse().values() * 2,
        lambda v: torch.ones(torch.sparse.mm(coo(v), coo(v))._values().shape),
    ],
)
def test_how_many_elements_there_are_is_data(program):
    """Shape inference says that there are none."""
    with pytest.raises(DataDependentError, match="how many elements it holds is data"):
        foregrad.aot_function(program, nop)(plain(4))


def test_what_cannot_be_is_refused_with_what_was_tried():
    with pytest.raises(UnsupportedError, match=r"torch\.sparse_coo_tensor\(indices, values, size\)"):
        foregrad.aot_function(lambda a, x: a @ x, nop)(coo(plain(4)), plain(4, 3))
    with pytest.raises(UnsupportedError, match=r"to_dense\(\)"):
        foregrad.aot_function(coo, nop)(leaf(4))
    assert torch.equal(foregrad.aot_function(lambda v: coo(v).to_dense(), nop)(leaf(4)), coo(plain(4)).to_dense())
