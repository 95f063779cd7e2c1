import torch
from torch import nn

from gcnzc.exchange.layout import describe_layout, group_by_dtype, hash_lines


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False), nn.Embedding(4, 3))


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
