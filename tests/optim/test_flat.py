import torch
from torch import nn

from gcnzc.exchange.layout import describe_layout, group_by_dtype, hash_lines
from gcnzc.optim.flat import FlatVector


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False), nn.Embedding(4, 3))


def test_parameters_go_into_the_vector_and_back():
    given = model()
    flat = FlatVector(list(given.named_parameters()), extra=2)
    flat.extra.fill_(7.0)
    values = flat.read_parameters()
    assert values is flat.values
    expected = torch.cat([p.detach().reshape(-1) for p in given.parameters()])
    assert torch.equal(values[:-2], expected)
    assert flat.extra.tolist() == [7.0, 7.0]
    places = [parameter.data_ptr() for parameter in given.parameters()]
    flat.values[:-2] += 1
    flat.write_parameters()
    assert torch.equal(
        torch.cat([p.detach().reshape(-1) for p in given.parameters()]), expected + 1
    )
    # ordinary tensors, where they were
    assert places == [parameter.data_ptr() for parameter in given.parameters()]
    for segment, view in zip(flat.segments, flat.views(), strict=True):
        assert torch.equal(view, segment.parameter)


def test_gradients_that_are_missing_or_sparse():
    given = model()
    named = list(given.named_parameters())
    flat = FlatVector(named)
    flat.values.fill_(float("nan"))
    given[0].weight.grad = torch.full((2, 3), 2.0)
    given[2].weight.grad = torch.sparse_coo_tensor(
        [[1, 1, 3]], torch.ones(3, 3), (4, 3), check_invariants=False
    )
    values = flat.read_gradients(scale=0.5)
    dense = torch.zeros(4, 3)
    dense[1], dense[3] = 1.0, 0.5
    expected = [torch.ones(6), torch.zeros(2), torch.zeros(4), dense.reshape(-1)]
    assert torch.equal(values, torch.cat(expected))
    # one is wanted although it was missing, and one is not
    kept = given[0].weight.grad
    flat.write_gradients([True, True, False, True])
    assert given[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(2, 3))
    assert torch.equal(given[0].bias.grad, torch.zeros(2))
    assert given[1].weight.grad is None
    assert torch.equal(given[2].weight.grad, dense)


def test_one_vector_for_each_dtype_and_each_tied_parameter_once():
    given = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2).half()})
    given["b"].weight = given["a"].weight
    named = [*given.named_parameters(remove_duplicate=False)]
    kinds = group_by_dtype(named)
    assert [[name for name, _ in kind] for kind in kinds] == [
        ["a.weight", "a.bias", "b.bias"],
        ["c.weight", "c.bias"],
    ]


def test_layouts_name_the_difference():
    lines = describe_layout(model().named_parameters())
    assert lines[0] == "0.weight (2, 3) torch.float32 cpu"
    frozen = model()
    frozen[0].weight.requires_grad = False
    others = [
        describe_layout(frozen.named_parameters()),
        describe_layout(model().double().named_parameters()),
        describe_layout(nn.Sequential(nn.Linear(3, 2)).named_parameters()),
        lines[::-1],
    ]
    hashes = {hash_lines(each) for each in [lines, *others]}
    assert len(hashes) == 5
    assert hash_lines(lines) == hash_lines(describe_layout(model().named_parameters()))
    assert all(0 <= each < 2**63 for each in hashes)
