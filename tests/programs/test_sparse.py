"""Sparse tensors: arguments, buffers, gradients of embeddings, products of matrices, and what is refused."""

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
    with pytest.raises(UnsupportedError, match=r"to_dense\(\)"):
        foregrad.aot_function(coo, nop)(leaf(4))
    assert torch.equal(foregrad.aot_function(lambda v: coo(v).to_dense(), nop)(leaf(4)), coo(plain(4)).to_dense())


# ---------------------------------------------------------------------------------------------------------------------
# Sparse arguments, parameters and buffers.
GIVEN = {
    "coo": lambda: coo(plain(4)),
    "coalesced": lambda: coo(plain(4)).coalesce(),
    "csr": lambda: plain(4, 4).relu().to_sparse_csr(),
    "csc": lambda: plain(4, 4).relu().to_sparse_csc(),
}
TAKING = {
    "sparse.mm": torch.sparse.mm,
    "matmul": lambda a, x: a @ x,
    "transposed": lambda a, x: a.t() @ x,
    "scaled": lambda a, x: (a * 2) @ x,
    "summed": lambda a, x: (a + a) @ x,
    "addmm": lambda a, x: torch.sparse.addmm(x, a, x),
    "dense": lambda a, x: a.to_dense() @ x,
    "returned": lambda a, x: (a, a.detach(), a @ x),
    "numbers": lambda a, x: x * a._nnz(),
}


@pytest.mark.parametrize("program", TAKING.values(), ids=TAKING)
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_sparse_arguments(given, program):
    check(program, given().detach().requires_grad_(), leaf(4, 3))


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_sparse_arguments_that_require_no_grad(given):
    check(lambda a, x: (a @ x, a.t() @ x, a.to_dense()), given(), leaf(4, 3))


COO_ONLY = {
    "coalesced": lambda a, x: a.t().coalesce() @ x,
    "is_coalesced": lambda a, x: x * a.is_coalesced(),
    "values": lambda a, x: a._values().sum() * x,
    "values as a result": lambda a, x: (a._values(), a._indices(), a @ x),
    "sum": lambda a, x: torch.sparse.sum(a, 1).to_dense() @ x,
    "squared": lambda a, x: torch.sparse.mm(a, a).to_dense() @ x,
    "mask": lambda a, x: (x @ x.t()).sparse_mask(a.coalesce()).to_dense(),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("program", COO_ONLY.values(), ids=COO_ONLY)
def test_sparse_arguments_of_indices_and_values(program, requires_grad):
    check(program, coo(plain(4)).requires_grad_(requires_grad), leaf(4, 3))


def test_another_number_of_elements_is_another_program():
    compiled = foregrad.aot_function(lambda a, x: a.coalesce()._values().sum() * x + a @ x, nop)
    x = plain(4, 3)
    with pytest.raises(DataDependentError):
        compiled(coo(plain(4)), x)
    compiled = foregrad.aot_function(lambda a, x: a._values().sum() * x + a @ x, nop)
    empty = torch.zeros(4, 4).to_sparse()
    for a in (coo(plain(4)), coo(plain(4)), torch.eye(4).to_sparse(), empty):
        assert torch.equal(compiled(a, x), a._values().sum() * x + a @ x)
    assert [str(change) for change in compiled.recompiles] == [
        "args[0].is_coalesced() was False, is True",
        "args[0]._indices().shape was (2, 4), is (2, 0); for a program before that, args[0].is_coalesced() was False, "
        "is True",
    ]


def test_other_layouts_are_other_programs():
    compiled = foregrad.aot_function(lambda a, x: a @ x, nop)
    for a in (torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4)):
        assert torch.equal(compiled(a, plain(4, 3)), plain(4, 3))
    assert len(compiled.specializations) == 3


def test_sparse_buffers_and_parameters_train_as_in_eager():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.weight = nn.Linear(3, 3), nn.Parameter(torch.eye(4).to_sparse())
            self.register_buffer("adjacency", coo(plain(4)))

        def forward(self, x):
            return torch.sparse.mm(self.weight, torch.sparse.mm(self.adjacency, self.linear(x)))

    gradients = []
    for compile in (lambda module: module, lambda module: foregrad.aot_module(module, nop)):
        torch.manual_seed(0)
        model = Model()
        called = compile(model)
        for _ in range(2):  # the second gradient is added to the first
            called(plain(4, 3)).square().sum().backward()
        model.adjacency = torch.eye(4).to_sparse()
        called(plain(4, 3)).sum().backward()
        assert model.weight.grad.is_sparse
        gradients.append([model.weight.grad.to_dense(), model.linear.weight.grad])
    assert all(map(torch.equal, *gradients))


def test_gradients_of_gradients_of_sparse_arguments():
    def program(a, x):
        return torch.sparse.mm(a, x).sin()

    found = []
    for called in (program, foregrad.aot_function(program, nop)):
        a, x = coo(plain(4)).requires_grad_(), leaf(4, 3)
        (gradient,) = torch.autograd.grad(called(a, x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append([x.grad, a.grad.to_dense()])
    assert all(map(torch.equal, *found))


def test_writes_that_a_sparse_tensor_shows_are_refused_and_nothing_is_written():
    def halves(a, v):
        v.div_(2)
        return a @ v.new_ones(4, 1)

    compiled = foregrad.aot_function(halves, nop)
    compiled(coo(plain(4)), plain(4))  # they share nothing
    values = plain(4)
    for program, a in ((compiled, coo(values)), (foregrad.aot_function(halves, nop), coo(values))):
        with pytest.raises(UnsupportedError, match="the sparse args"):
            program(a, values)
    for writes in (lambda a, v: a.mul_(2), lambda a, v: a._values().mul_(2)):
        with pytest.raises(UnsupportedError, match="sparse"):
            foregrad.aot_function(writes, nop)(coo(values), values)
    assert torch.equal(values, plain(4))


def test_a_derivative_that_looks_into_a_compressed_tensor_is_refused():
    a = torch.eye(4).to_sparse_csr().requires_grad_()
    with pytest.raises(UnsupportedError, match="where recording cannot see it"):
        foregrad.aot_function(lambda a: a.values() * 2, nop)(a)
    assert torch.equal(foregrad.aot_function(lambda a: a.values() * 2, nop)(a.detach()), torch.full((4,), 2.0))
