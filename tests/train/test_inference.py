"""Layer-wise inference equals dense formulas, and blocks with all neighbours."""

import os

import pytest
import torch
from by_hand import MODELS, STACKS, made, random_graph
from processes import results
from torch import Tensor
from torch.nn import functional

from gcnzc.exchange import Group, init_group
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.models import GAT, GCN, SAGE, GATv2
from gcnzc.sampling.neighbor import Sampler
from gcnzc.train.inference import inference
from gcnzc.train.layerwise import ranges, store


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_blocks_with_all_neighbours(name):
    graph = random_graph(400, 3000)
    model = made(name, 20, 16, 5).float().eval()
    x = torch.randn(400, 20)
    batch = Sampler(graph, [-1, -1, -1]).sample(torch.arange(400), epoch=0)
    expected = model(batch.blocks, x[batch.nodes])
    found = inference(model, graph, FeatureTable(x), batch_nodes=64)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_does_not_change_inference(name):
    graph, x = random_graph(), torch.randn(60, 12)
    model = made(name, 12, 8, 4).float()
    expected = inference(model, graph, FeatureTable(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(inference(model, graph, FeatureTable(x)), expected)
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("in_features", [3, 30])
def test_inference_for_some_nodes(name, in_features):
    """Nodes in any order, twice too; and hidden rows only of what they depend on."""
    # a chain, of which the last nodes need little
    graph = Graph.from_edges(torch.arange(99), torch.arange(1, 100), 100)
    model = made(name, in_features, 8, 4)
    x = torch.randn(100, in_features).double()
    nodes = torch.tensor([40, 7, 40, 99, 0], dtype=torch.int32)
    whole = inference(model, graph, FeatureTable(x))
    seen = []
    found = inference(
        model, graph, FeatureTable(x), nodes=nodes, progress=lambda *step: seen.append(step)
    )
    torch.testing.assert_close(found, whole[nodes.long()])
    hidden = [{40, 7, 99, 0, 39, 6, 98}, {40, 7, 99, 0, 39, 6, 98, 38, 5, 97}]
    assert seen[-1] == (4 + len(hidden[0]) + len(hidden[1]),) * 2


KINDS = ["half", "sparse", "rows apart", "codes"]


def made_table(kind: str, x: Tensor) -> FeatureTable:
    """A table of the rows `x`, of whole numbers, or of what is nearest to them."""
    if kind == "codes":
        return FeatureTable.quantized(x)
    if kind == "half":
        return FeatureTable(x.half())
    if kind == "rows apart":
        apart = torch.full((len(x), 3), torch.nan)
        return FeatureTable(torch.cat([x, apart], 1)[:, : x.shape[1]])
    at = x.nonzero(as_tuple=True)
    offsets = torch.bincount(at[0], minlength=len(x)).cumsum(0)
    return FeatureTable(
        torch.sparse_csr_tensor(
            functional.pad(offsets, (1, 0)), at[1], x[at], x.shape, check_invariants=True
        )
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_features", [3, 30])
@pytest.mark.parametrize("some", [False, True])
def test_inference_reads_any_table(name, kind, in_features, some):
    graph = random_graph()
    model = made(name, in_features, 8, 4).float()
    x = torch.randint(-2, 3, (60, in_features)).float()
    table = made_table(kind, x)
    # of whole numbers from -2 to 2 other kinds keep all
    x = table.gather(torch.arange(60)).float()
    nodes = torch.tensor([3, 50, 59]) if some else None
    expected = inference(model, graph, FeatureTable(x), nodes=nodes)
    found = inference(model, graph, table, nodes=nodes, batch_nodes=7)
    torch.testing.assert_close(found, expected)


def test_inference_bounds_the_edges_of_a_range(monkeypatch):
    graph = random_graph()
    model = made("gat", 5, 4, 3)
    table = FeatureTable(torch.randn(60, 5).double())
    expected = inference(model, graph, table)
    monkeypatch.setattr(ranges, "BATCH_EDGES", 20)
    steps = []
    found = inference(model, graph, table, progress=lambda *step: steps.append(step))
    torch.testing.assert_close(found, expected)
    assert len(steps) >= 3 * graph.num_edges / (20 + int(graph.in_degrees().max()))
    assert steps[-1] == (180, 180)


# each model on narrow rows of some nodes and on wide rows of all, and each kind of table
SPREAD = [
    *((name, "float32", *sizes) for name in MODELS for sizes in ((3, True), (30, False))),
    *(("sage", kind, 30, kind in ("half", "codes")) for kind in KINDS),
]


def outputs_of_all(group: Group | None) -> list[Tensor]:
    """Outputs of every kind of model, table and choice of nodes, in small ranges."""
    usual = ranges.BATCH_EDGES, store.PIECE_BYTES, torch.get_num_threads()
    ranges.BATCH_EDGES, store.PIECE_BYTES = 60, 1000
    torch.set_num_threads(1)
    torch.manual_seed(0)
    graph, found = random_graph(), []
    x = torch.randint(-2, 3, (60, 30)).float()
    for name, kind, in_features, some in SPREAD:
        model = made(name, in_features, 8, 4).float()
        rows = x[:, :in_features].contiguous()
        table = FeatureTable(rows) if kind == "float32" else made_table(kind, rows)
        # of a few nodes alone, some workers have none
        nodes = torch.tensor([3, 50, 59, 50]) if some else None
        out = inference(model, graph, table, nodes=nodes, batch_nodes=7, group=group)
        found.append(out.clone())
    for make_model, stack in zip((SAGE, GCN, GAT, GATv2), STACKS, strict=True):
        stacked = make_model(30, 8, 4, **stack)
        for nodes in (None, torch.tensor([3, 50, 59, 50])):
            out = inference(
                stacked, graph, FeatureTable(x), nodes=nodes, batch_nodes=7, group=group
            )
            found.append(out.clone())
    ranges.BATCH_EDGES, store.PIECE_BYTES = usual[:2]
    torch.set_num_threads(usual[2])
    return found


def work_on_outputs(per_machine: int) -> tuple[list[Tensor], list[tuple[int, int]], int]:
    """The outputs, what progress told, and the bytes sent, of a worker on such machines."""
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % per_machine)
    steps: list[tuple[int, int]] = []
    with init_group() as group:
        found = outputs_of_all(group)
        graph, model = random_graph(), made("sage", 5, 4, 3)
        table = FeatureTable(torch.randn(60, 5).double())
        inference(
            *(model, graph, table),
            batch_nodes=5,
            progress=lambda *step: steps.append(step),
            group=group,
        )
        entries = group.ledger.entries
        return found, steps, entries["AllToAll"].bytes_sent if "AllToAll" in entries else 0


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return outputs_of_all(None)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("world_size", "per_machine"), [pytest.param(2, 2, marks=pytest.mark.slow), (3, 2)]
)
def test_workers_compute_the_same_bits_as_one(expected, world_size, per_machine, tmp_path):
    shares = []
    for found, steps, num_bytes in results(world_size, tmp_path, work_on_outputs, per_machine):
        assert len(found) == len(expected) == len(SPREAD) + 2 * len(STACKS)
        for number, (mine, right) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(mine, right), number
        assert steps[-1][0] == steps[-1][1]
        shares.append(steps[-1][1])
        # names of shared memory take 2 kB, and rows between machines more than 50 kB
        assert (num_bytes > 10_000) == (per_machine < world_size)
    # each node once in each of three layers, by one of them
    assert sum(shares) == 180
    assert all(shares)


def test_invalid_arguments_are_rejected():
    graph, model = random_graph(), made("sage", 5, 4, 3)
    table = FeatureTable(torch.randn(60, 5).double())
    with pytest.raises(
        ValueError, match="the features have 6 columns, but the model expects 5\n\nhint:"
    ):
        inference(model, graph, FeatureTable(torch.randn(60, 6)))
    with pytest.raises(ValueError, match="59 rows of features for a graph of 60 nodes\n\nhint:"):
        inference(model, graph, FeatureTable(torch.randn(59, 5)))
    with pytest.raises(ValueError, match="60, but the graph has 60 nodes"):
        inference(model, graph, table, nodes=torch.tensor([60]))
