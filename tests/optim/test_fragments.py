import re

import pytest
import torch
from optim.models import Everything
from torch import nn

from gcnzc.optim.flat_parameters import FlatParameters
from gcnzc.optim.local.fragments import split_into_fragments


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        self.scale = nn.Parameter(torch.ones(()))


def flat_params_of(model):
    return FlatParameters(torch.optim.SGD(model.parameters(), lr=1.0).param_groups)


def check_every_element_once(flat_params, fragments):
    """Each fragment writes a number of its own; every element gets one, and is read back."""
    assert sum(fragment.num_elements for fragment in fragments) == flat_params.num_elements
    seen = torch.zeros(flat_params.num_elements, dtype=torch.int64)
    for number, fragment in enumerate(fragments, 1):
        flat_params.write_parameters(flat_params.zeros())
        before = torch.arange(1, fragment.num_elements + 1).to(flat_params.dtype)
        fragment.write(before)
        written = flat_params.read_parameters(flat_params.empty())
        assert int((written != 0).sum()) == fragment.num_elements, fragment.name
        seen[written != 0] += number
        seen[written != 0] += 1000
        assert torch.equal(fragment.read(torch.empty_like(before)), before)
    assert bool((seen // 1000 == 1).all())


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 100])
def test_slices_cover_every_element_once_and_have_nearly_equal_sizes(count):
    flat_params = flat_params_of(Everything())
    fragments = split_into_fragments(flat_params, count)
    assert len(fragments) == count
    check_every_element_once(flat_params, fragments)
    sizes = [fragment.num_elements for fragment in fragments]
    assert max(sizes) - min(sizes) <= 1


def test_there_are_at_most_as_many_slices_as_elements():
    flat_params = flat_params_of(nn.Linear(2, 2))
    check_every_element_once(flat_params, split_into_fragments(flat_params, 6))
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"{count} fragments of 6 elements"):
            split_into_fragments(flat_params, count)


def test_a_fragment_for_each_module():
    model = Layers()
    fragments = split_into_fragments(flat_params_of(model), "modules", model.named_parameters())
    assert [(each.name, each.num_elements) for each in fragments] == [
        ("the model", 1),
        ("layers.0", 12),
        ("layers.1", 12),
        ("head.0", 8),
        ("head.1", 4),
    ]
    check_every_element_once(flat_params_of(model), fragments)


def test_fragments_by_names_and_the_rest():
    model = Layers()
    fragments = split_into_fragments(
        flat_params_of(model), [r"bias$", r"^layers"], model.named_parameters()
    )
    assert [(each.name, each.num_elements) for each in fragments] == [
        ("bias$", 10),
        ("^layers", 18),
        ("the rest", 9),
    ]
    check_every_element_once(flat_params_of(model), fragments)
    with pytest.raises(ValueError, match="no parameter for the fragment 'tail'"):
        split_into_fragments(flat_params_of(model), ["head", "tail"], model.named_parameters())


def test_tied_and_frozen_parameters_and_those_without_a_name():
    model = Everything()
    fragments = split_into_fragments(
        flat_params_of(model), "modules", model.named_parameters(remove_duplicate=False)
    )
    check_every_element_once(flat_params_of(model), fragments)
    names = [fragment.name for fragment in fragments]
    assert names.count("first") == 1
    with pytest.raises(ValueError, match=r"(?s)no name for group 0, parameter 1.*named_parameters"):
        split_into_fragments(flat_params_of(model), "modules")
    for wrong in ("layers", ["("], [], 1.5, None):
        with pytest.raises(ValueError, match=rf"fragments is {re.escape(repr(wrong))}\n\nhint: "):
            split_into_fragments(flat_params_of(model), wrong, model.named_parameters())


def test_parameters_that_are_not_contiguous():
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    assert not model.weight.is_contiguous()
    flat_params = flat_params_of(model)
    fragments = split_into_fragments(flat_params, 3)
    expected = flat_params.read_parameters(flat_params.empty())
    read = [each.read(torch.empty(each.num_elements)) for each in fragments]
    assert torch.equal(torch.cat(read), expected)
    check_every_element_once(flat_params, fragments)


def test_half_precision_is_read_exactly_and_rounded_when_written():
    model = nn.Linear(3, 4).bfloat16()
    flat_params = flat_params_of(model)
    (fragment,) = split_into_fragments(flat_params, 1)
    values = fragment.read(flat_params.empty())
    assert torch.equal(values[:12].view(4, 3), model.weight.float())
    fragment.write(values + 1)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.bias, (values[12:] + 1).bfloat16())
