import re

import pytest
import torch
from optim.models import Everything
from torch import nn

from gcnzc.exchange import Group
from gcnzc.optim import StreamingDiLoCo


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        self.scale = nn.Parameter(torch.ones(()))


def of(model, fragments, **options):
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return StreamingDiLoCo(inner, Group(0, 2), fragments=fragments, **options)


def by_name(model, fragments):
    return of(model, fragments, named_parameters=model.named_parameters())


def parameters_of(optimizer):
    """The numbers that identify the parameters of each fragment."""
    bounds = [(fragment.here.start, fragment.here.stop) for fragment in optimizer.fragments]
    segments = optimizer.flat.segments
    return [
        [id(each.parameter) for each in segments if begin <= each.here.start < end]
        for begin, end in bounds
    ]


def check_every_element_once(optimizer):
    """Each fragment writes a number of its own; every element gets one, and is read back."""
    flat = optimizer.flat
    assert sum(each.num_elements for each in optimizer.fragments) == flat.num_elements
    for number, fragment in enumerate(optimizer.fragments, 1):
        flat.write_parameters(torch.full((fragment.num_elements,), float(number)), fragment.here)
    written = torch.cat([each.detach().reshape(-1) for each in flat.parameters])
    for number, fragment in enumerate(optimizer.fragments, 1):
        assert int((written == number).sum()) == fragment.num_elements
        read = flat.read_parameters(torch.empty(fragment.num_elements), fragment.here)
        assert bool((read == number).all())


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 100])
def test_slices_cover_every_element_once_and_have_nearly_equal_sizes(count):
    optimizer = of(Everything(), count)
    assert len(optimizer.fragments) == count
    check_every_element_once(optimizer)
    sizes = [fragment.num_elements for fragment in optimizer.fragments]
    assert max(sizes) - min(sizes) <= 1


def test_there_are_at_most_as_many_slices_as_elements():
    check_every_element_once(of(nn.Linear(2, 2), 6))
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"{count} fragments of 6 elements"):
            of(nn.Linear(2, 2), count)


def test_a_fragment_for_each_module():
    model = Layers()
    optimizer = by_name(model, "modules")
    layers = [model.layers[0], model.layers[1], *model.head]
    expected = [[id(model.scale)], *([id(p) for p in each.parameters()] for each in layers)]
    assert parameters_of(optimizer) == expected
    check_every_element_once(optimizer)


def test_fragments_by_names_and_the_rest():
    model = Layers()
    optimizer = by_name(model, [r"bias$", r"^layers"])
    assert [each.num_elements for each in optimizer.fragments] == [10, 18, 9]
    check_every_element_once(optimizer)
    with pytest.raises(ValueError, match="no parameter for the fragment 'tail'"):
        by_name(model, ["head", "tail"])


def test_tied_and_frozen_parameters_and_those_without_a_name():
    model = Everything()
    optimizer = of(
        model, "modules", named_parameters=model.named_parameters(remove_duplicate=False)
    )
    check_every_element_once(optimizer)
    with pytest.raises(ValueError, match=r"(?s)no name for group 0, parameter 1.*named_parameters"):
        of(model, "modules")
    for wrong in ("layers", ["("], [], 1.5, None):
        with pytest.raises(ValueError, match=rf"fragments is {re.escape(repr(wrong))}\n\nhint: "):
            by_name(model, wrong)


def test_parameters_that_are_not_contiguous():
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    assert not model.weight.is_contiguous()
    optimizer = of(model, 3)
    flat, parts = optimizer.flat, optimizer.fragments
    read = [flat.read_parameters(torch.empty(each.num_elements), each.here) for each in parts]
    assert torch.equal(torch.cat(read), flat.values)
    check_every_element_once(optimizer)


def test_half_precision_is_read_exactly_and_rounded_when_written():
    model = nn.Linear(3, 4).bfloat16()
    flat = of(model, 1).flat
    for here in (slice(0, 16), slice(2, 14)):
        values = flat.read_parameters(torch.empty(here.stop - here.start), here)
        expected = torch.cat([model.weight.reshape(-1), model.bias]).float()[here]
        assert torch.equal(values, expected)
        flat.write_parameters(values + 1, here)
        after = torch.cat([model.weight.reshape(-1), model.bias])[here]
        assert torch.equal(after, (expected + 1).bfloat16())
