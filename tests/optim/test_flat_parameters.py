import copy
import pickle

import pytest
import torch
from torch import nn

from gcnzc.optim.flat import FlatParameters


def groups():
    torch.manual_seed(2)
    coded, dense = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4).bfloat16())
    frozen = nn.Parameter(torch.randn(5), requires_grad=False)
    more = nn.Parameter(torch.randn(()))
    return [
        {"params": [coded, frozen]},
        {"params": [dense], "compress": False},
        {"params": [more]},
    ]


def test_parameters_go_into_a_vector_and_back():
    made = groups()
    flat_params = FlatParameters(made)
    before = [each.detach().clone() for each in flat_params.parameters]
    values = flat_params.read_parameters(flat_params.empty(2))
    assert values.shape == (13,)
    assert values.dtype == torch.float32
    assert torch.equal(values[:4].bfloat16(), before[0])
    assert torch.equal(values[4:10].view(2, 3), before[1])
    flat_params.write_parameters(values * 2)
    assert all(map(torch.equal, flat_params.parameters, [2 * each for each in before]))
    assert all(not each.requires_grad or each.is_leaf for each in flat_params.parameters)


def test_gradients_of_all_kinds_are_read():
    table, dense, none = (nn.Parameter(torch.ones(4, 2)) for _ in range(3))
    flat_params = FlatParameters([{"params": [table, dense, none]}])
    table.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (4, 2), check_invariants=True)
    dense.grad = torch.full((4, 2), 3.0)
    values = torch.full((25,), 7.0)
    flat_params.read_gradients(values, 0.5)
    of_table, of_dense, of_none = flat_params.views(values)
    assert of_table.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    assert bool((of_dense == 1.5).all())
    assert not bool(of_none.any())
    # what follows the gradients is left alone
    assert values[24] == 7
    assert flat_params.have_gradients() == [True, True, False]
    assert torch.equal(
        flat_params.read_gradients(flat_params.empty(), torch.tensor([0.5])), values[:24]
    )


def test_parameters_keep_their_memory():
    given = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False), nn.Embedding(4, 3))
    flat_params = FlatParameters([{"params": list(given.parameters())}])
    places = [parameter.data_ptr() for parameter in given.parameters()]
    values = flat_params.read_parameters(flat_params.empty()) + 1
    flat_params.write_parameters(values)
    assert places == [parameter.data_ptr() for parameter in given.parameters()]
    for parameter, view in zip(given.parameters(), flat_params.views(values), strict=True):
        assert torch.equal(view, parameter)


def test_gradients_are_written_where_they_are_wanted():
    given = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False), nn.Embedding(4, 3))
    flat_params = FlatParameters([{"params": list(given.parameters())}])
    given[0].weight.grad = kept = torch.full((2, 3), 2.0)
    given[1].weight.grad = torch.ones(2, 2)
    given[2].weight.grad = torch.sparse_coo_tensor(
        [[1, 1, 3]], torch.ones(3, 3), (4, 3), check_invariants=False
    )
    values = flat_params.read_gradients(flat_params.empty(), 0.5)
    # one is wanted although it was missing, and one is not
    flat_params.write_gradients(values, [True, True, False, True])
    dense = torch.zeros(4, 3)
    dense[1], dense[3] = 1.0, 0.5
    assert given[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(2, 3))
    assert torch.equal(given[0].bias.grad, torch.zeros(2))
    assert given[1].weight.grad is None
    assert torch.equal(given[2].weight.grad, dense)


def test_the_scratch_vector_is_reused_and_not_copied():
    parameter = nn.Parameter(torch.ones(3))
    flat_params = FlatParameters([{"params": [parameter]}])
    first = flat_params.scratch(4)
    first.fill_(5)
    second = flat_params.scratch(2)
    assert second.shape == (5,)
    assert second.data_ptr() == first.data_ptr()
    assert copy.deepcopy(flat_params).scratch(4).data_ptr() != first.data_ptr()
    assert len(pickle.dumps(flat_params.scratch(1 << 16))) > 1 << 18
    assert len(pickle.dumps(flat_params)) < 1 << 16


def test_one_double_makes_all_vectors_double():
    single, double = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())
    assert FlatParameters([{"params": [single]}]).dtype == torch.float32
    assert FlatParameters([{"params": [single, double]}]).zeros().dtype == torch.float64


def test_nothing_to_train_and_several_devices_are_errors():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(ValueError, match="no parameter of the optimizer has requires_grad"):
        FlatParameters([{"params": [frozen]}])
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="on several devices: cpu, meta"):
        FlatParameters([{"params": [nn.Parameter(torch.ones(2)), elsewhere]}])
