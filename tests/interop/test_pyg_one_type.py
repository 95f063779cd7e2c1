"""Times, weights, replacement, disjoint and undirected subgraphs in PyG's loaders of `Data`."""

import copy
import importlib.util
import pickle

import pytest
import torch

if importlib.util.find_spec("torch_geometric") is None:
    pytest.skip("PyG is not installed", allow_module_level=True)

from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader, importing

pyg = importing.import_pyg()
from torch_geometric.data import Data, HeteroData  # noqa: E402
from torch_geometric.loader import link_loader, node_loader  # noqa: E402
from torch_geometric.sampler import BaseSampler, NegativeSampling, SamplerOutput  # noqa: E402
from torch_geometric.sampler.base import SubgraphType  # noqa: E402
from torch_geometric.sampler.neighbor_sampler import edge_sample  # noqa: E402

NODES, EDGES, LATEST = 60, 500, 20
# random numbers depend on the names of the types
TYPE = ("node", "to", "node")


def make_data():
    numbers = torch.Generator().manual_seed(7)
    data = Data(name="graph")
    data.x = torch.randn(NODES, 4, generator=numbers)
    data.edge_index = torch.randint(NODES, (2, EDGES), generator=numbers)
    data.edge_attr = torch.arange(EDGES)
    data.born = torch.randint(LATEST, (NODES,), generator=numbers)
    data.at = torch.randint(LATEST, (EDGES,), generator=numbers)
    data.weight = torch.rand(EDGES, generator=numbers) * (torch.arange(EDGES) % 3 > 0)
    return data


@pytest.fixture
def data():
    return make_data()


def typed(data):
    """The same graph as a `HeteroData` with one type."""
    found = HeteroData()
    for name in ("x", "born"):
        found["node"][name] = data[name]
    for name in ("edge_index", "edge_attr", "at", "weight"):
        found[TYPE][name] = data[name]
    return found


SAMPLINGS = [
    {"replace": True},
    {"disjoint": True},
    {"weight_attr": "weight"},
    {"weight_attr": "weight", "replace": True, "disjoint": True},
    {"time_attr": "born"},
    {"time_attr": "born", "temporal_strategy": "last"},
    {"time_attr": "at", "input_time": torch.arange(NODES) % LATEST},
    {"subgraph_type": "induced"},
    {"directed": False, "disjoint": True},
    {"subgraph_type": SubgraphType.induced, "time_attr": "born"},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_minibatches_equal_those_of_a_heterogeneous_graph_with_one_type(data, sampling):
    options = {"batch_size": 9, "seed": 3, "shuffle": True, **sampling}
    mine = NeighborLoader(data, [4, 3], **options)
    theirs = NeighborLoader(typed(data), [4, 3], "node", **options)
    for batch, other in zip(mine, theirs, strict=True):
        assert isinstance(batch, Data)
        assert batch.name == "graph"
        for name in ("x", "born", "n_id", "input_id", "batch_size", "batch", "seed_time"):
            assert_same(batch.get(name), other["node"].get(name), name)
        for name in ("edge_index", "edge_attr", "at", "weight", "e_id", "num_sampled_edges"):
            assert_same(batch.get(name), other[TYPE].get(name), name)
        if "num_sampled_edges" in batch:
            assert batch.num_sampled_nodes == other["node"].num_sampled_nodes


def assert_same(mine, other, name):
    if isinstance(other, torch.Tensor):
        assert torch.equal(mine, other), name
    else:
        assert mine == other, name


class Recorded(BaseSampler):
    """Gives PyG's loader the sampled nodes and edges of a minibatch of ours."""

    edge_permutation = None

    def __init__(self, batch):
        self.batch = batch

    def sample_from_edges(self, *args, **kwargs):
        raise NotImplementedError

    def sample_from_nodes(self, index, **kwargs):
        row, col = self.batch.edge_index
        return SamplerOutput(
            node=self.batch.n_id,
            row=row,
            col=col,
            edge=self.batch.e_id,
            batch=self.batch.get("batch"),
            num_sampled_nodes=self.batch.get("num_sampled_nodes"),
            num_sampled_edges=self.batch.get("num_sampled_edges"),
            metadata=(index.input_id, index.time),
        )


def assert_equals_pygs(mine, theirs):
    assert set(mine.keys()) == set(theirs.keys())
    for name, value in theirs.to_dict().items():
        if isinstance(value, torch.Tensor):
            assert mine[name].dtype == value.dtype, name
        assert_same(mine[name], value, name)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, {"subgraph_type": "bidirectional"}])
def test_fields_equal_those_of_pyg_for_the_same_nodes(data, sampling):
    nodes = torch.arange(5, 40)
    sampling = dict(sampling)
    if "input_time" in sampling:
        sampling["input_time"] = sampling["input_time"][nodes].int()
    mine = next(iter(NeighborLoader(data, [3, 2], nodes, batch_size=8, **sampling)))
    theirs = node_loader.NodeLoader(
        data,
        Recorded(mine),
        input_nodes=nodes,
        input_time=sampling.get("input_time"),
        batch_size=8,
    )
    assert_equals_pygs(mine, next(iter(theirs)))


@pytest.mark.parametrize("neg_sampling", [None, "binary", ("binary", 2), ("triplet", 2)])
@pytest.mark.parametrize(
    "sampling", [{"disjoint": True}, {"time_attr": "born"}, {"time_attr": "at"}, {"replace": True}]
)
def test_fields_of_links_equal_those_of_pyg_for_the_same_samples(data, neg_sampling, sampling):
    if isinstance(neg_sampling, tuple):
        neg_sampling = NegativeSampling(*neg_sampling)
    pairs = data.edge_index[:, :30].flip(0)
    options = {"edge_label_index": pairs, "batch_size": 10, "neg_sampling": neg_sampling}
    if "time_attr" in sampling:
        options["edge_label_time"] = torch.arange(30, dtype=torch.int32)
    loader = LinkNeighborLoader(data, [3, 2], **options, **sampling)
    mine = next(iter(loader))
    theirs = link_loader.LinkLoader(data, Sampled(loader, mine), **options)
    assert_equals_pygs(mine, next(iter(theirs)))


class Fixed(NegativeSampling):
    """Returns given negative nodes, by endpoint."""

    def sample(self, num_samples, endpoint, num_nodes=None):
        assert len(self.negatives[endpoint]) == num_samples
        return self.negatives[endpoint]


class Sampled(BaseSampler):
    """PyG's own handling of edges, around gcnzc's sampler and the negatives of a minibatch."""

    edge_permutation = None

    def __init__(self, loader, batch):
        self.sampler, self.sampling, self.batch = loader._sampler, loader._sampling, batch

    def sample_from_nodes(self, *args, **kwargs):
        raise NotImplementedError

    def sample_from_edges(self, index, neg_sampling=None):
        if neg_sampling is not None:
            neg_sampling = Fixed(neg_sampling.mode, neg_sampling.amount)
            neg_sampling.negatives = self.negatives(len(index.row))
        disjoint = self.sampler.options.disjoint
        return edge_sample(index, self.sample, NODES, disjoint, None, neg_sampling)

    def negatives(self, num_pairs):
        """The negative nodes of the minibatch, in the order in which PyG samples them."""
        if "edge_label_index" in self.batch:
            ends = self.batch.n_id[self.batch.edge_label_index[:, num_pairs:]]
            return dict(zip(("src", "dst"), ends, strict=True))
        found = self.batch.dst_neg_index
        found = found.t() if "batch" in self.batch else found
        return {"dst": self.batch.n_id[found.flatten()]}

    def sample(self, seeds, times):
        batch = self.sampler.sample({"node": seeds}, 0, times)
        edge = ("node", "to", "node")
        return SamplerOutput(
            node=batch.nodes["node"],
            row=batch.row[edge],
            col=batch.col[edge],
            edge=batch.edge_ids[edge],
            batch=None if batch.subgraphs is None else batch.subgraphs["node"],
            num_sampled_nodes=list(batch.num_nodes["node"]),
            num_sampled_edges=list(batch.num_edges[edge]),
        )


def test_bidirectional_subgraphs_have_the_reverses_with_the_edges_that_they_reverse(data):
    for batch in NeighborLoader(data, [3, 2], batch_size=9, subgraph_type="bidirectional"):
        pairs = set(map(tuple, batch.edge_index.T.tolist()))
        assert len(pairs) == batch.num_edges
        assert pairs == {pair[::-1] for pair in pairs}
        # the order of PyG: by destination, then by source
        keys = batch.edge_index[1] * len(batch.n_id) + batch.edge_index[0]
        assert bool((keys[1:] > keys[:-1]).all())
        assert torch.equal(batch.edge_attr, batch.e_id)
        found, wanted = batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id]
        is_own, is_reverse = (found == wanted).all(0), (found == wanted.flip(0)).all(0)
        assert bool((is_own | is_reverse).all())
        assert 0 < int(is_own.sum()) < batch.num_edges
        # the sampled edges are those of a directional subgraph
        assert batch.get("num_sampled_edges") is None


def test_induced_subgraphs_have_all_edges_among_the_nodes(data):
    for batch in NeighborLoader(data, [3, 2], batch_size=9, subgraph_type="induced"):
        has_node = torch.zeros(NODES, dtype=torch.bool)
        has_node[batch.n_id] = True
        wanted = (has_node[data.edge_index[0]] & has_node[data.edge_index[1]]).nonzero().flatten()
        assert torch.equal(batch.e_id.sort().values, wanted)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("time_attr", ["at", "born"])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_nothing_is_later_than_the_seed(data, time_attr, strategy, is_sorted):
    if is_sorted:
        # in the order of the destinations, but not of the times
        order = data.edge_index[1].argsort(stable=True)
        for name in ("edge_index", "at"):
            data[name] = data[name][..., order]
    times = torch.randint(LATEST, (NODES,), generator=torch.Generator().manual_seed(1))
    temporal = {"time_attr": time_attr, "temporal_strategy": strategy, "input_time": times}
    num_edges = 0
    for batch in NeighborLoader(data, [3, 2], batch_size=5, is_sorted=is_sorted, **temporal):
        assert torch.equal(batch.seed_time, times[batch.input_id])
        src, dst = batch.edge_index
        found = batch.at if time_attr == "at" else batch.born[src]
        assert bool((found <= batch.seed_time[batch.batch[dst]]).all())
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        num_edges += len(found)
        own = (data.edge_index[1] == batch.n_id[0]).nonzero().flatten()
        of_edges = data.at if time_attr == "at" else data.born[data.edge_index[0]]
        eligible = of_edges[own][of_edges[own] <= batch.seed_time[0]].sort(descending=True).values
        first = found[dst == 0].sort(descending=True).values
        assert len(first) == min(len(eligible), 3)
        if strategy == "last":
            assert torch.equal(first, eligible[:3])
    assert num_edges > 100


def test_neighbours_are_sampled_by_weight(data):
    drawn = torch.zeros(EDGES)
    options = {"batch_size": NODES, "replace": True, "weight_attr": "weight", "seed": 0}
    loader = NeighborLoader(data, [5], **options)
    for _ in range(100):
        for batch in loader:
            drawn += torch.bincount(batch.e_id, minlength=EDGES)
    totals = torch.zeros(NODES).index_add_(0, data.edge_index[1], data.weight)
    wanted = 500 * data.weight / totals[data.edge_index[1]]
    assert not drawn[data.weight == 0].any()
    likely = wanted > 5
    assert int(likely.sum()) > 250
    # at most 333 values; the sum exceeds 450 with a chance below 1e-4
    assert float(((drawn - wanted)[likely] ** 2 / wanted[likely]).sum()) < 450


def test_the_default_arguments_are_sampled_without_types(data):
    plain = {"replace": False, "subgraph_type": "directional", "directed": True}
    plain |= {"temporal_strategy": "last", "disjoint": 0}
    for mine, other in zip(
        NeighborLoader(data, [3, 2], batch_size=9, seed=1, **plain),
        NeighborLoader(data, [3, 2], batch_size=9, seed=1),
        strict=True,
    ):
        assert torch.equal(mine.e_id, other.e_id)
    assert NeighborLoader(data, [3, 2], **plain)._typed is None


@pytest.mark.parametrize("sampling", [{"time_attr": "born"}, {"replace": True}])
def test_minibatches_depend_neither_on_threads_nor_on_resuming(data, sampling):
    def make(threads, **options):
        options = {"batch_size": 7, "shuffle": True, "seed": 5} | sampling | options
        return NeighborLoader(data, [3, 2], threads=threads, **options)

    whole = list(make(1))
    for threads in (2, 4):
        assert all(map(same, whole, make(threads)))
    loader = make(3)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    for other in (make(2), make(2, seed=None)):
        other.load_state_dict(state)
        assert all(map(same, other, whole[2:]))
    for changed in ({"subgraph_type": "bidirectional"}, {"weight_attr": "weight"}):
        with pytest.raises(ValueError, match=r"subgraph_type|weighted"):
            make(1, **changed).load_state_dict(state)
    with pytest.raises(ValueError, match="num_neighbors"):
        NeighborLoader(data, [3, 2], batch_size=7, shuffle=True, seed=5).load_state_dict(state)


def same(mine, other):
    return all(torch.equal(mine[name], other[name]) for name in ("n_id", "e_id", "edge_index", "x"))


def test_copies_and_subclasses_keep_the_options(data):
    class Own(NeighborLoader):
        def __init__(self, data):
            super().__init__(data, [3], disjoint=True, subgraph_type="bidirectional")

    assert "batch" in next(iter(Own(data)))
    loader = NeighborLoader(data, [3], time_attr="at", input_time=torch.arange(NODES), seed=1)
    other = copy.deepcopy(loader)
    assert all(map(same, loader, other))
    # Lightning reads the arguments from attributes
    for name, value in (("time_attr", "at"), ("replace", False), ("subgraph_type", "directional")):
        assert getattr(loader, name) == value
    assert loader.input_data[torch.tensor([4])].time.tolist() == [4]


@pytest.mark.gpu
def test_minibatches_on_a_gpu_equal_those_on_the_host(data):
    options = {"batch_size": 9, "seed": 3, "time_attr": "born"}
    other = NeighborLoader(data, [3, 2], **options)
    with NeighborLoader(data, [3, 2], device="cuda", **options) as loader:
        for mine, wanted in zip(loader, other, strict=True):
            assert mine.edge_index.is_cuda
            assert mine.batch.is_cuda
            assert same(mine.cpu(), wanted)


@pytest.mark.parametrize("Loader", [NeighborLoader, LinkNeighborLoader])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"subgraph_type": "forward"}, "subgraph_type is 'forward'"),
        ({"temporal_strategy": "first"}, "temporal_strategy is 'first'"),
        ({"replace": 3}, "replace"),
        ({"disjoint": "yes"}, "disjoint"),
        ({"directed": 2}, "directed"),
        ({"time_attr": "day"}, "time_attr is 'day', which is not an attribute of nodes or edges"),
        ({"time_attr": "name"}, "time_attr is 'name', which is not an attribute"),
        ({"time_attr": 5}, "time_attr is 5"),
        ({"time_attr": "x"}, "data.x"),
        ({"time_attr": "weight"}, "times are integers"),
        ({"weight_attr": "day"}, "weight_attr is 'day'"),
        ({"weight_attr": "born"}, r"data.born has shape \(60,\)"),
        ({"weight_attr": "negative"}, r"data.negative\[0\] is -1"),
        ({"num_neighbors": {TYPE: [2]}, "disjoint": True}, "num_neighbors by edge type"),
        ({"num_neighbors": [-2], "disjoint": True}, "num_neighbors"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(data, Loader, change, message):
    data.negative = -torch.ones(EDGES)
    with pytest.raises((TypeError, ValueError), match=message):
        Loader(**({"data": data, "num_neighbors": [2]} | change))


def test_times_of_items_are_checked(data):
    for options, message in (
        ({"time_attr": "at"}, "the nodes of type 'node' have no times"),
        ({"time_attr": "born", "input_time": torch.arange(3)}, "input_time has 3 times"),
        ({"input_time": torch.arange(NODES)}, "input_time was given without time_attr"),
    ):
        with pytest.raises(ValueError, match=message):
            NeighborLoader(data, [2], **options)
    for options, message in (
        ({"time_attr": "at"}, "time_attr was given, but .edge_label_time. is not set"),
        ({"edge_label_time": torch.arange(EDGES)}, "edge_label_time was given without time_attr"),
        ({"time_attr": "at", "edge_label_time": torch.arange(3)}, r"edge_label_time has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            LinkNeighborLoader(data, [2], **options)
