"""`sample_hetero` equals its reference for columns, chunks and workspaces of all sizes."""

import numpy as np
import pytest
import torch
from bits import same_tensors
from gcnzc.kernels.sample.hetero import HeteroOptions, HeteroWorkspace, sample_hetero
from gcnzc.kernels.sample.hetero_graph import HeteroTables, Relation
from gcnzc.kernels.sample.hetero_reference import sample_hetero_reference

from gcnzc.kernels.sample import hetero

NUM_NODES, NODE_TYPES = [700, 300], ["u", "v"]
EDGE_TYPES = [("u", "r", "v"), ("v", "s", "u")]


@pytest.fixture(scope="module")
def relations():
    """Columns of 0 to 60 edges, and some that are longer than fanouts with a bitmap."""
    random = np.random.default_rng(0)
    found = []
    for src, dst in ((0, 1), (1, 0)):
        degrees = random.integers(0, 60, NUM_NODES[dst])
        degrees[:8] = [0, 63, 64, 65, 66, 130, 131, 900]
        indptr = np.concatenate([[0], degrees.cumsum()])
        num_edges = int(indptr[-1])
        indices = random.integers(0, NUM_NODES[src], num_edges).astype(np.int32)
        times = np.concatenate([np.sort(random.integers(0, 50, count)) for count in degrees])
        weights = (random.random(num_edges) * random.integers(0, 2, num_edges)).astype(np.float32)
        arrays = map(torch.from_numpy, (indptr, indices, random.permutation(num_edges), times))
        indptr, indices, edge_ids, times = arrays
        own = Relation(src, dst, indptr, indices, edge_ids, times, None, torch.from_numpy(weights))
        found.append(own)
    return found


def without_weights(relations):
    return [
        Relation(each.src, each.dst, each.indptr, each.indices, each.edge_ids, each.edge_time)
        for each in relations
    ]


def assert_same(drawn, expected):
    assert drawn.num_nodes == expected.num_nodes
    assert drawn.num_edges == expected.num_edges
    assert same_tensors(drawn, expected)


def check(relations, options, seeds, times=None, workspace=None, epoch=1, excluded=None):
    tables = HeteroTables(NUM_NODES, NODE_TYPES, relations, EDGE_TYPES, 2**64 - 3)
    drawn = sample_hetero(
        *(tables, options, seeds, epoch),
        seed_times=times,
        excluded=excluded,
        workspace=workspace,
    )
    expected = sample_hetero_reference(
        *(NUM_NODES, NODE_TYPES, relations, EDGE_TYPES, options, seeds, epoch, 2**64 - 3, times),
        {r: set(positions.tolist()) for r, positions in (excluded or {}).items()},
    )
    assert_same(drawn, expected)
    return drawn


@pytest.mark.parametrize("fanouts", [((64, 64),), ((65, 3), (2, 130)), ((-1, -1), (1, 0))])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_long_columns_and_many_chunks(relations, fanouts, replace, weighted):
    graph = relations if weighted else without_weights(relations)
    seeds = [(1, torch.arange(300)), (0, torch.arange(0, 700, 7))]
    drawn = check(graph, HeteroOptions(fanouts, replace=replace), seeds)
    assert sum(map(len, drawn.rows)) > 4096


@pytest.mark.parametrize("temporal", ["uniform", "last"])
def test_long_columns_with_times(relations, temporal):
    options = HeteroOptions(((66, 66), (3, 3)), temporal=temporal, disjoint=True)
    check(without_weights(relations), options, [(1, torch.arange(12))], torch.arange(12) * 5)


@pytest.fixture(scope="module", params=["some", "few", "all of a column"])
def excluded(relations, request):
    random = np.random.default_rng(2)
    found = {}
    for r, relation in enumerate(relations[:1] if request.param == "few" else relations):
        share = 0.02 if request.param == "few" else 0.4
        is_excluded = random.random(len(relation.indices)) < share
        if request.param == "all of a column":
            is_excluded[: int(relation.indptr[5])] = True
        found[r] = torch.from_numpy(np.flatnonzero(is_excluded))
    return found


@pytest.mark.parametrize("fanouts", [((5, 64),), ((3, 3), (130, 2)), ((-1, -1), (1, 0))])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_excluded_edges_are_as_if_they_did_not_exist(
    relations, excluded, fanouts, replace, weighted
):
    graph = relations if weighted else without_weights(relations)
    seeds = [(1, torch.arange(0, 300, 5)), (0, torch.arange(0, 700, 70))]
    options = HeteroOptions(fanouts, replace=replace, once=False)
    drawn = check(graph, options, seeds, excluded=excluded)
    for r, positions in excluded.items():
        ids = graph[r].edge_ids[positions]
        assert not bool(torch.isin(drawn.edge_ids[r], ids).any())


@pytest.mark.parametrize("temporal", ["uniform", "last"])
@pytest.mark.parametrize("induced", [False, True])
def test_excluded_edges_with_times_and_induced_subgraphs(relations, excluded, temporal, induced):
    options = HeteroOptions(((6, 66), (3, 3)), temporal=temporal, disjoint=True, induced=induced)
    seeds, times = [(1, torch.arange(12))], torch.arange(12) * 5
    check(without_weights(relations), options, seeds, times, excluded=excluded)


@pytest.mark.parametrize("direct", [True, False])
def test_a_workspace_serves_any_batches(relations, direct, monkeypatch):
    if not direct:
        monkeypatch.setattr(hetero, "DIRECT_NODES", 0)
    graph, workspace = without_weights(relations), HeteroWorkspace()
    random = np.random.default_rng(1)
    for epoch, count in enumerate((1, 250, 3, 0, 120)):
        disjoint = epoch % 2 == 1
        seeds = [(1, torch.from_numpy(random.integers(0, 300, count)))]
        options = HeteroOptions(((4, 5), (3, 2)), disjoint=disjoint)
        check(graph, options, seeds, workspace=workspace, epoch=epoch)
        # stamps start again before they exceed 32 bits
        workspace.base = 2**30 + 1 if epoch == 2 else workspace.base


def test_capacities_of_earlier_batches_are_not_part_of_the_result(relations):
    graph, workspace = without_weights(relations), HeteroWorkspace()
    poisoned = lambda length, dtype: torch.full((length,), -7, dtype=dtype)  # noqa: E731
    tables = HeteroTables(NUM_NODES, NODE_TYPES, graph, EDGE_TYPES, 0)
    options = HeteroOptions(((5, 5), (5, 5)))
    for count in (200, 2):
        seeds = [(1, torch.arange(count))]
        drawn = sample_hetero(tables, options, seeds, 0, workspace=workspace, empty=poisoned)
        for tensors in (drawn.nodes, drawn.rows, drawn.cols, drawn.edge_ids):
            assert all(bool((each >= 0).all()) for each in tensors)


def test_wrong_options_are_errors(relations):
    tables = HeteroTables(NUM_NODES, NODE_TYPES, relations, EDGE_TYPES, 0)
    seeds = [(1, torch.arange(2))]
    with pytest.raises(ValueError, match="epoch 4294967296"):
        sample_hetero(tables, HeteroOptions(((1, 1),)), seeds, 2**32)
    options = HeteroOptions(((1, 1),), temporal="last", disjoint=True)
    with pytest.raises(ValueError, match="without their times"):
        sample_hetero(tables, options, seeds, 0)
    for disjoint in (False, True):
        huge = HeteroOptions(((2**31 - 1, 1),), replace=True, disjoint=disjoint)
        with pytest.raises(ValueError, match="more than 2147483647 nodes"):
            sample_hetero(tables, huge, [(1, torch.arange(200))], 0)
