"""Code that the drop-in loaders share: torch's arguments, random numbers, columns, devices."""

import gc
import inspect
import weakref
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from bits import tensors_of
from libraries import needs_pyg
from transfer_programs import checked, replaced_threads

from gcnzc import FeatureTable
from gcnzc.interop.column import Column
from gcnzc.interop.options import ORDERING, WITHOUT_EFFECT
from gcnzc.loader.transfer import Transfer

CPU = torch.device("cpu")


def test_every_argument_of_torchs_dataloader_is_classified():

    theirs = set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters)
    ours = {"self", "dataset", "batch_size", "shuffle", "drop_last", "num_workers"}
    assert theirs == ours | (theirs & {*WITHOUT_EFFECT, *ORDERING, "collate_fn"})


SHAPES = {
    "vector": lambda: torch.randn(9),
    "strided vector": lambda: torch.randn(9, 3)[:, 1],
    "truth": lambda: torch.rand(9) < 0.5,
    "matrix": lambda: torch.randn(9, 4, dtype=torch.float16),
    "columns apart": lambda: torch.randn(4, 9).T,
    "part of a matrix": lambda: torch.randn(9, 8)[:, 2:5],
    "cube": lambda: torch.randn(9, 2, 3),
    "strided cube": lambda: torch.randn(3, 2, 9).permute(2, 1, 0),
    "no columns": lambda: torch.randn(9, 0),
    "no entries of a cube": lambda: torch.randn(9, 0, 3),
    "int8": lambda: torch.randint(100, (9, 5), dtype=torch.int8),
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("ids", [torch.tensor([8, 0, 0, 3]), torch.empty(0, dtype=torch.int64)])
def test_columns_of_every_shape_are_gathered(make, ids):
    rows = make()
    column = Column("rows", rows, 9, CPU, ExitStack())
    found = column.gather_in_thread(ids)
    assert found.dtype == rows.dtype
    assert torch.equal(found, rows[ids])
    assert column.shape == rows.shape[1:]
    # on the host there is nothing to lock
    assert column.lock() is column.table


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_columns_may_be_tables_and_sparse_rows():
    rows, ids = torch.randn(9, 4), torch.tensor([2, 2, 7])
    table, sparse = FeatureTable.quantized(rows), (rows * (rows > 0)).to_sparse_csr()
    for given, expected in ((table, table.gather(ids)), (sparse, sparse.to_dense()[ids])):
        found = Column("x", given, 9, CPU, ExitStack()).gather_in_thread(ids)
        assert torch.equal(found, expected)


@needs_pyg
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["nodes", "bidirectional", "triplets"])
def test_typed_minibatches_on_streams_equal_those_on_the_host(kind, seed):
    from interop.test_pyg_hetero import BUYS, make_data
    from pyg_recorded import assert_equal

    from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader

    data = make_data()
    options = {"batch_size": 9, "seed": 3, "threads": 2}
    if kind == "triplets":
        given = {"neg_sampling": "triplet"}
        make = partial(LinkNeighborLoader, data, [3, 2], edge_label_index=BUYS, **given, **options)
    else:
        given = {"subgraph_type": "bidirectional"} if kind == "bidirectional" else {}
        make = partial(NeighborLoader, data, [3, 2], "item", **given, **options)
    wanted = list(make())
    with replaced_threads():
        device, loader = checked(seed), make()
        found = loader._found
        # as if a GPU read them
        for key in (("user", "x"), ("item", "x")):
            found.read_in_place[key] = found.columns.pop(key)
        prefetched = found.prefetched
        assert {kind: name for kind, (name, _) in prefetched.items()} == {"user": "x", "item": "x"}
        tables = {kind: column.table for kind, (_, column) in prefetched.items()}
        inner = loader._loader
        inner._transfer = Transfer(device, tables, 0.0, max_pending=inner.ahead + 1)
        inner._host_pool = loader.pool = loader._sampler.pool = inner._transfer.host
        first = iter(loader)
        batches = [next(first)]
        # of the next epoch, which does not go through these streams
        data["user"].x = data["user"].x[:, :2].contiguous()
        iter(loader).close()
        batches += first
        for mine, other in zip(batches, wanted, strict=True):
            stores = [*mine.node_stores, *mine.edge_stores]
            device.own.do(device.read, *tensors_of([[*store.values()] for store in stores]))
            assert_equal(mine, other)
        device.schedule.join_all()
    assert not device.races


@needs_pyg
@pytest.mark.parametrize("kind", ["item", None])
def test_edges_go_to_a_gpu_as_csc(kind):
    from interop.test_pyg_hetero import LIKES, make_data
    from pyg_recorded import assert_equal

    from gcnzc.interop.pyg import NeighborLoader

    data = make_data()
    if kind is None:
        data = data.node_type_subgraph(["item"]).to_homogeneous()
    loader = NeighborLoader(data, [3, 2], kind, seed=1)
    wanted, loader.device = loader(range(9)), torch.device("cuda")
    batch = loader.sample(torch.arange(9), 0)
    assert (LIKES if kind else ("node", "to", "node"), "edge_index") not in batch.values
    assert_equal(loader._finish_minibatch(batch), wanted)


@needs_pyg
def test_an_unreferenced_loader_releases_its_memory():
    from gcnzc.interop.pyg import NeighborLoader
    from gcnzc.interop.pyg.importing import import_pyg

    Data = import_pyg().data.Data
    data = Data(x=torch.randn(9, 2), edge_index=torch.randint(9, (2, 50)))
    loader = NeighborLoader(data, [2])
    ended = []
    loader._locks.callback(ended.append, True)
    held = weakref.ref(loader)
    list(loader)
    assert not ended
    del loader
    gc.collect()
    assert held() is None
    assert ended == [True]
