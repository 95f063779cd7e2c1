"""What a user's sampler yields is checked: a wrong item is named, with its position."""

import re
from itertools import islice

import numpy as np
import pytest
import torch
from pyg_or_skip import pyg

from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader
from gcnzc.system.arguments import describe

NODES, EDGES = 20, 30
ENDS = torch.stack([torch.arange(EDGES) % NODES, (7 * torch.arange(EDGES) + 3) % NODES])
DATA = pyg.data.Data(x=torch.rand(NODES, 3), edge_index=ENDS)


def dgl_loader(**options):
    interop = pytest.importorskip("gcnzc.interop.dgl")
    dgl = interop.import_dgl()
    sampler = dgl.dataloading.NeighborSampler([2])
    graph = dgl.graph(tuple(ENDS), num_nodes=NODES)
    return interop.DataLoader(graph, torch.arange(NODES), sampler, **options)


LOADERS = {
    "NeighborLoader": (lambda **options: NeighborLoader(DATA, [2], **options), NODES),
    "LinkNeighborLoader": (lambda **options: LinkNeighborLoader(DATA, [2], **options), EDGES),
    "DGL": (dgl_loader, NODES),
}
# NODES is the number of items of any loader
OUT_OF_RANGE = (-1, NODES, 2**70, torch.tensor(-1))
NO_INTEGERS = (1.5, 2.0, True, "7", None, [1, 2], np.float32(1.5), np.bool_(True))
NO_INTEGERS += (np.array([1, 2]), torch.tensor(1.5), torch.tensor(True))


@pytest.mark.parametrize("value", [*OUT_OF_RANGE, *NO_INTEGERS], ids=str)
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("option", ["sampler", "batch_sampler"])
def test_a_wrong_item_of_a_sampler_is_rejected_with_a_message_that_has_its_position(
    name, option, value
):
    make, count = LOADERS[name]
    value = count if value is NODES else value
    items = [3, 1, 2, 5, 4, value, 6]
    if option == "sampler":
        loader = make(sampler=items, batch_size=3)
    else:
        loader = make(batch_sampler=[items[:3], items[3:]])
    shown = describe(value if np.ndim(value) else getattr(value, "item", lambda: value)())
    expected = f"minibatch 1 of {option} has {re.escape(shown)} at position 2"
    is_integer = any(value is each for each in (*OUT_OF_RANGE, count))
    with pytest.raises(IndexError if is_integer else TypeError, match=expected):
        list(loader)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("123", "has '1' at position 0"),
        (7, "is 7, not a list of integers"),
        (torch.tensor(7), r"is a tensor of torch.int64 and shape \(\), not a list"),
        (torch.tensor([True] * NODES), "has True at position 0"),
        (np.array([True] * NODES), "has True at position 0"),
        (torch.tensor([0.5]), "has 0.5 at position 0"),
        (torch.tensor([[1, 2], [3, 4]]), r"has a tensor of torch.int64 and shape \(2,\) at posit"),
        (["a"], "has 'a' at position 0"),
    ],
)
def test_a_minibatch_that_is_no_list_of_integers_is_rejected(name, group, message):
    make, _ = LOADERS[name]
    with pytest.raises(TypeError, match=f"minibatch 0 of batch_sampler {message}"):
        list(make(batch_sampler=[group]))


GROUPS_AS_LISTS = [[5, 6], [1], [2, 3, 4]]
GROUPS = {
    "lists": GROUPS_AS_LISTS,
    "tuples": [tuple(group) for group in GROUPS_AS_LISTS],
    "ranges": [range(5, 7), range(1, 2), range(2, 5)],
    "int16": [torch.tensor(group, dtype=torch.int16) for group in GROUPS_AS_LISTS],
    "arrays": [np.array([5, 6]), np.array([1], np.int8), np.array([2, 3, 4], np.uint64)],
    "NumPy's": [[np.int64(5), np.uint8(6)], [np.int32(1)], list(np.arange(2, 5))],
    "one element": [list(torch.tensor([5, 6])), [torch.tensor([1])], torch.tensor([[2], [3], [4]])],
}


@pytest.mark.parametrize("kind", GROUPS)
def test_items_may_be_any_integers_that_pyg_takes(kind):
    found, theirs = (
        [batch.input_id.tolist() for batch in loader]
        for loader in (
            NeighborLoader(DATA, [2], batch_sampler=GROUPS[kind]),
            # of PyG only the reading of the items, since its sampling needs compiled extensions
            torch.utils.data.DataLoader(
                range(NODES),
                batch_sampler=GROUPS[kind],
                collate_fn=pyg.sampler.NodeSamplerInput(None, torch.arange(NODES)).__getitem__,
            ),
        )
    )
    assert found == theirs == GROUPS_AS_LISTS


def test_minibatches_may_be_generators():
    def groups():
        yield (item for item in (5, 6))
        yield iter([1])

    loader = NeighborLoader(DATA, [2], batch_sampler=groups())
    assert [batch.input_id.tolist() for batch in islice(loader, 3)] == [[5, 6], [1]]
