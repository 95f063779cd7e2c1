"""PyG's convolutions on minibatches of the PyG loaders, and on PyG's own data of the same edges."""

import inspect
import typing

import pyg_or_skip  # noqa: F401
import pytest
import torch
from torch.nn import Linear
from torch_geometric import nn
from torch_geometric.data import Data, HeteroData

from gcnzc.interop.pyg import NeighborLoader

# of what PyG uses of `typing`, on Python 3.13
pytestmark = pytest.mark.filterwarnings("ignore:Failing to pass a value to the 'type_params'")

WIDTH, OUT = 4, 3
NODES = {"user": 40, "item": 50, "shop": 5}
BUYS, BOUGHT = ("user", "buys", "item"), ("item", "bought", "user")
LIKES, SELLS = ("user", "likes", "user"), ("shop", "sells", "item")
EDGES = {BUYS: 200, BOUGHT: 150, LIKES: 100, SELLS: 50}
METADATA = [*NODES], [*EDGES]


def nodes(conv, x, edge_index, edges):
    return conv(x, edge_index)


def attributes(conv, x, edge_index, edges):
    return conv(x, edge_index, edges)


def weights(conv, x, edge_index, edges):
    return conv(x, edge_index, edges[:, 0].sigmoid())


def pseudo(conv, x, edge_index, edges):
    return conv(x, edge_index, edges.sigmoid())


def types_of(count):
    return torch.arange(count) % 3


def edge_types(conv, x, edge_index, edges):
    return conv(x, edge_index, types_of(len(edges)))


def all_types(conv, x, edge_index, edges):
    return conv(x, edge_index, types_of(len(x)), types_of(len(edges)), edges)


def first_nodes(conv, x, edge_index, edges):
    return conv(x, x.flip(0), edge_index)


def layers_of_nodes(conv, x, edge_index, edges):
    return conv(torch.stack([x, x.cos()], 1), edge_index)


def signs(conv, x, edge_index, edges):
    return conv(x, edge_index[:, ::2], edge_index[:, 1::2])


def colors(conv, x, edge_index, edges):
    return conv(types_of(len(x)), edge_index)


def positions(x):
    return tuple(each[:, :3] for each in x) if isinstance(x, tuple) else x[:, :3]


def points(conv, x, edge_index, edges):
    return conv(x, positions(x), edge_index)


def normals(conv, x, edge_index, edges):
    return conv(x, positions(x), positions(x), edge_index)


def mlp(inputs, outputs=OUT):
    return Linear(inputs, outputs)


# which are of graphs with one type of nodes
NO_LOOPS = {"add_self_loops": False}
PNA = ["mean", "max", "std"], ["identity", "amplification"], torch.ones(5), WIDTH
# how to create a convolution of a number of channels, or of a pair of sources and destinations, and
# how to call it
CONVS = [
    (lambda c: nn.AGNNConv(), nodes),
    (lambda c: nn.APPNP(2, 0.1), weights),
    (lambda c: nn.ARMAConv(c, OUT, 2, 2), weights),
    (lambda c: nn.AntiSymmetricConv(c), nodes),
    (lambda c: nn.CGConv(c, WIDTH), attributes),
    (lambda c: nn.ChebConv(c, OUT, 2), weights),
    (lambda c: nn.ClusterGCNConv(c, OUT), nodes),
    (lambda c: nn.DNAConv(WIDTH, 2), layers_of_nodes),
    (lambda c: nn.DirGNNConv(nn.SAGEConv(c, OUT)), nodes),
    (lambda c: nn.EGConv(c, 4, num_heads=2), nodes),
    (lambda c: nn.EdgeConv(mlp(2 * WIDTH)), nodes),
    (lambda c: nn.FAConv(WIDTH), first_nodes),
    (lambda c: nn.FastRGCNConv(c, OUT, 3), edge_types),
    (lambda c: nn.FeaStConv(WIDTH, OUT, 2, **NO_LOOPS), nodes),
    (lambda c: nn.FiLMConv(c, OUT, 3), edge_types),
    (lambda c: nn.GATConv(c, OUT, 2), nodes),
    (lambda c: nn.GATConv(c, OUT, 2, edge_dim=WIDTH, **NO_LOOPS), attributes),
    (lambda c: nn.GATv2Conv(c, OUT, 2), nodes),
    (lambda c: nn.GATv2Conv(c, OUT, 2, edge_dim=WIDTH, **NO_LOOPS), attributes),
    (lambda c: nn.GCN2Conv(WIDTH, 0.1), first_nodes),
    (lambda c: nn.GCNConv(c, OUT), weights),
    (lambda c: nn.GENConv(c, OUT, edge_dim=WIDTH), attributes),
    (lambda c: nn.GINConv(mlp(WIDTH)), nodes),
    (lambda c: nn.GINEConv(mlp(WIDTH), edge_dim=WIDTH), attributes),
    (lambda c: nn.GMMConv(c, OUT, WIDTH, 2), pseudo),
    (lambda c: nn.GPSConv(WIDTH, nn.SAGEConv(c, WIDTH)), nodes),
    (lambda c: nn.GatedGraphConv(WIDTH, 2), weights),
    (lambda c: nn.GeneralConv(c, OUT, WIDTH, attention=True), attributes),
    (lambda c: nn.GraphConv(c, OUT, "max"), weights),
    (lambda c: nn.HEATConv(c, OUT, 3, 3, 2, WIDTH, 2), all_types),
    (lambda c: nn.HypergraphConv(c, OUT), nodes),
    (lambda c: nn.LEConv(c, OUT), weights),
    (lambda c: nn.LGConv(), weights),
    (lambda c: nn.MFConv(c, OUT), nodes),
    (lambda c: nn.MixHopConv(c, OUT), weights),
    (lambda c: nn.NNConv(c, OUT, mlp(WIDTH, WIDTH * OUT), "mean"), attributes),
    (lambda c: nn.PDNConv(c, OUT, WIDTH, 5), attributes),
    (lambda c: nn.PNAConv(c, OUT, *PNA), attributes),
    (lambda c: nn.PPFConv(mlp(WIDTH + 4), **NO_LOOPS), normals),
    (lambda c: nn.PointGNNConv(mlp(WIDTH, 3), mlp(WIDTH + 3, 5), mlp(5, WIDTH)), points),
    (lambda c: nn.PointNetConv(mlp(WIDTH + 3)), points),
    (lambda c: nn.PointTransformerConv(c, OUT), points),
    (lambda c: nn.RGATConv(c, OUT, 3, edge_dim=WIDTH), edge_types),
    (lambda c: nn.RGCNConv(c, OUT, 3, num_bases=2), edge_types),
    (lambda c: nn.ResGatedGraphConv(c, OUT, edge_dim=WIDTH), attributes),
    (lambda c: nn.SAGEConv(c, OUT, "mean"), nodes),
    (lambda c: nn.SAGEConv(c, OUT, "lstm"), nodes),
    (lambda c: nn.SAGEConv(c, OUT, ["min", "std"], project=True), nodes),
    (lambda c: nn.SGConv(c, OUT, 2), weights),
    (lambda c: nn.SSGConv(c, OUT, 0.1, 2), weights),
    (lambda c: nn.SignedConv(WIDTH, OUT, True), signs),
    (lambda c: nn.SimpleConv("max"), weights),
    (lambda c: nn.SuperGATConv(c, OUT, 2), nodes),
    (lambda c: nn.TAGConv(c, OUT), weights),
    (lambda c: nn.TransformerConv(c, OUT, 2, edge_dim=WIDTH, beta=True), attributes),
    (lambda c: nn.WLConv(), colors),
    (lambda c: nn.WLConvContinuous(), weights),
]
# of all types at once
TYPED = {
    "HANConv": lambda: nn.HANConv(WIDTH, OUT * 2, METADATA, 2),
    "HGTConv": lambda: nn.HGTConv(WIDTH, OUT * 2, METADATA, 2),
    "HeteroConv": lambda: nn.HeteroConv({e: nn.SAGEConv((-1, -1), OUT) for e in EDGES}, "max"),
}
NOT_TESTED = (
    # they need pylibcugraphops, dgNN, torch-sparse or torch-spline-conv
    "CuGraphGATConv CuGraphRGCNConv CuGraphSAGEConv FusedGATConv PANConv SplineConv "
    # they find the edges themselves, with torch-cluster
    "DynamicEdgeConv GravNetConv XConv "
    # its nodes are edges of a mesh with four neighbours; and the base class
    "MeshCNNConv MessagePassing"
)


def random_rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def random_edges(src, dst, count):
    random = torch.Generator().manual_seed(count)
    ends = [torch.randint(NODES[kind], (count,), generator=random) for kind in (src, dst)]
    return torch.stack(ends)


def edges_of(edge_index, store, source_ids, target_ids):
    """The edges of a minibatch, made of its ids with PyG alone."""
    found = []
    for ends, ids in zip(edge_index[:, store.e_id], (source_ids, target_ids), strict=True):
        places = torch.full((100,), -1)
        places[ids] = torch.arange(len(ids))
        found.append(places[ends])
    return torch.stack(found)


@pytest.fixture(scope="module")
def pair():
    """A minibatch of gcnzc's loader, and PyG's data of its nodes and edges."""
    edge_index = random_edges("item", "item", 200)
    data = Data(random_rows(NODES["item"], WIDTH), edge_index, random_rows(200, WIDTH))
    ours = next(iter(NeighborLoader(data, [4, 3], batch_size=10, seed=0)))
    edges = edges_of(edge_index, ours, ours.n_id, ours.n_id)
    return ours, Data(data.x[ours.n_id], edges, data.edge_attr[ours.e_id])


@pytest.fixture(scope="module")
def typed_pair():
    """A minibatch of `HeteroData` of gcnzc's loader, and PyG's data of its nodes and edges."""
    data, theirs = HeteroData(), HeteroData()
    for kind, count in NODES.items():
        data[kind].x = random_rows(count, WIDTH)
    for each, count in EDGES.items():
        data[each].edge_index = random_edges(each[0], each[2], count)
        data[each].edge_attr = random_rows(count, WIDTH)
    loader = NeighborLoader(data, [4, 3], input_nodes="user", batch_size=10, seed=0)
    ours = next(iter(loader))
    for kind in NODES:
        theirs[kind].x = data[kind].x[ours[kind].n_id]
    for each in EDGES:
        ids = ours[each[0]].n_id, ours[each[2]].n_id
        theirs[each].edge_index = edges_of(data[each].edge_index, ours[each], *ids)
        theirs[each].edge_attr = data[each].edge_attr[ours[each].e_id]
        assert theirs[each].num_edges > 0
    return ours, theirs


def check_equal(compute, pair):
    """Compare what `compute` returns, and all gradients, of two minibatches.

    Args:
        compute: is given a minibatch, and returns outputs and parameters.
        pair: the minibatches.
    """
    results = []
    for batch in pair:
        torch.manual_seed(1)
        batch = batch.clone()
        inputs = []
        for store in batch.stores:
            for name in ("x", "edge_attr"):
                if name in store:
                    store[name] = store[name].clone().requires_grad_()
                    inputs.append(store[name])
        outputs, parameters = compute(batch)
        # PyG's layers also return edges, and colours
        outputs = [output for output in outputs if output.is_floating_point()] or outputs
        if outputs[0].requires_grad:
            sum((output * output).sum() for output in outputs).backward()
        results.append([*outputs, *(given.grad for given in (*inputs, *parameters))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def list_outputs(found):
    return list(found) if isinstance(found, tuple) else [found]


def name_of(value):
    return value.__name__ if value.__name__ != "<lambda>" else type(value(WIDTH)).__name__


def test_each_convolution_is_tested_or_named():
    classes = {each for each in vars(nn.conv).values() if inspect.isclass(each)}
    tested = {type(create(WIDTH)) for create, _ in CONVS} | {getattr(nn, name) for name in TYPED}
    untested = {each for each in classes if each.__name__ in NOT_TESTED.split()}
    assert not tested & untested
    assert tested | untested == classes


# a new layer is compiled, so both tests of one are one
@pytest.mark.parametrize(("create", "call"), CONVS, ids=name_of)
def test_convolutions_equal_those_on_pygs_data(pair, typed_pair, create, call):
    def compute(batch):
        conv = create(WIDTH)
        found = call(conv, batch.x, batch.edge_index, batch.edge_attr)
        return list_outputs(found), conv.parameters()

    check_equal(compute, pair)

    def compute_bipartite(batch):
        outputs, parameters = [], []
        for each in EDGES:
            conv = create((WIDTH, WIDTH))
            ends = batch[each[0]].x, batch[each[2]].x
            found = call(conv, ends, *batch[each].values("edge_index", "edge_attr"))
            outputs += list_outputs(found)
            parameters += conv.parameters()
        return outputs, parameters

    hint = typing.get_type_hints(type(create(WIDTH)).forward)["x"]
    if any(typing.get_origin(each) is tuple for each in typing.get_args(hint)):
        check_equal(compute_bipartite, typed_pair)


# no edge type ends at shops
@pytest.mark.filterwarnings("ignore:There exist node types")
@pytest.mark.parametrize("name", TYPED)
def test_typed_convolutions_equal_those_on_pygs_data(typed_pair, name):
    def compute(batch):
        conv = TYPED[name]()
        found = conv(batch.x_dict, batch.edge_index_dict)
        return [own for own in found.values() if own is not None], conv.parameters()

    check_equal(compute, typed_pair)


class Messages(nn.MessagePassing):
    """Copies of sources and edges, and each binary operator of a source, a target and an edge."""

    def forward(self, x, edge_index, edges):
        return self.propagate(edge_index, x=x, edges=edges)

    def message(self, x_i, x_j, edges):
        return torch.cat([x_j, edges, x_i + x_j, x_i - edges, x_j * edges, x_j / x_i], dim=1)


AGGREGATIONS = ["sum", "mean", "min", "max", "mul", "var", "std", "softmax"]


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations_equal_those_on_pygs_data(pair, typed_pair, name):
    conv = Messages(name)
    check_equal(lambda batch: ([conv(batch.x, batch.edge_index, batch.edge_attr)], []), pair)

    def compute(batch):
        return [
            conv((batch[each[0]].x, batch[each[2]].x), store.edge_index, store.edge_attr)
            for each, store in zip(batch.edge_types, batch.edge_stores, strict=True)
        ], []

    check_equal(compute, typed_pair)
