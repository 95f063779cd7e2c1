"""Typed minibatches on a device equal those of the CPU, in any order of execution."""

import copy
from contextlib import ExitStack
from dataclasses import fields

import numpy as np
import pytest
import torch
from queued_device import Device

from gcnzc import FeatureTable, pinned
from gcnzc.features.cache import cached
from gcnzc.graph.hetero import HeteroGraph
from gcnzc.loader import HeteroLoader, base, checks
from gcnzc.loader.transfer import Transfer
from gcnzc.sampling import HeteroLinkSampler, HeteroSampler

USERS, ITEMS, SHOPS = 300, 200, 40
BUYS, BOUGHT, KNOWS = ("user", "buys", "item"), ("item", "rev_buys", "user"), ("user", "k", "user")
SELLS = ("shop", "sells", "item")
# shops are never reached from these edges to them
VISITS = ("shop", "visits", "shop")
SCHEDULES = ("eager", "lazy", "not model", "not side 1", "not side 2", 0)
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def graph():
    random = np.random.default_rng(4)
    pairs = np.stack([random.integers(0, USERS, 2000), random.integers(0, ITEMS, 2000)])
    times = random.integers(0, 50, 2000)
    return HeteroGraph.from_arrays(
        {"user": USERS, "item": ITEMS, "shop": SHOPS, "city": 5},
        {
            BUYS: {"edge_index": pairs, "time": times},
            BOUGHT: {"edge_index": pairs[::-1], "time": times},
            KNOWS: {"edge_index": random.integers(0, USERS, (2, 900))},
            SELLS: {
                "edge_index": np.stack([random.integers(0, SHOPS, 60), np.arange(60)]),
            },
            VISITS: {"edge_index": random.integers(0, SHOPS, (2, 50))},
        },
    )


@pytest.fixture(scope="module")
def tables():
    generator = torch.Generator().manual_seed(2)
    rows = {
        name: torch.randn(count, columns, generator=generator)
        for name, count, columns in (("user", USERS, 7), ("item", ITEMS, 12), ("city", 5, 3))
    }
    # shops have no table, and cities are in no minibatch
    return {
        "user": FeatureTable(rows["user"].half()),
        "item": FeatureTable.quantized(rows["item"]),
        "city": FeatureTable(rows["city"]),
    }


KINDS = {
    "nodes": {},
    "without edge ids": {"edge_ids": False},
    "disjoint": {"disjoint": True},
    "temporal": {"temporal": "last", "time": "edge"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
    "links": {},
    "temporal links": {"temporal": "uniform", "time": "edge"},
}


@pytest.fixture
def make(graph, tables):
    def make(kind="nodes", hops=3, **options):
        sampler = HeteroSampler(graph, [3, 2, 2][:hops], seed=1, **KINDS[kind])
        options = {"tables": tables, "threads": 2} | options
        if "links" in kind:
            return HeteroLoader(HeteroLinkSampler(sampler, BUYS), None, 700, **options)
        ids = torch.arange(0, USERS, 3)
        if kind == "temporal":
            options["seed_times"] = torch.arange(len(ids)) % 60
        return HeteroLoader(
            sampler, ("user", ids), 30, labels=torch.arange(2 * len(ids)).view(-1, 2), **options
        )

    return make


def through(loader, device, share=0.0):
    """Let a loader for the CPU send its minibatches through the streams of a device."""
    shares = {name: 1.0 if own.is_sparse else share for name, own in loader.tables.items()}
    loader._transfer = Transfer(device, loader.tables, shares, max_pending=loader.ahead + 1)
    loader._host_pool = loader.sampler.pool = loader._transfer.host
    return loader


def flatten(value, name):
    """Yield the names and values of the parts of a field."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flatten(part, (*name, key))
    elif isinstance(value, tuple) and value and hasattr(value[0], "indptr"):
        for hop, block in enumerate(value):
            for field in fields(block):
                yield (*name, hop, field.name), getattr(block, field.name)
    else:
        yield name, value


def parts_of(batch):
    """Return all parts of a minibatch by name, but how long the work took."""
    names = [each.name for each in fields(batch) if each.name not in ("times", "spans", "stages")]
    return {part: value for name in names for part, value in flatten(getattr(batch, name), (name,))}


def read_by_model(batch, want, device):
    """Queue copies of all tensors of a minibatch; return them with the expected tensors."""
    found, expected = parts_of(batch), parts_of(want)
    assert found.keys() == expected.keys()
    pairs = []
    for name, right in expected.items():
        if not isinstance(right, torch.Tensor):
            assert found[name] == right, name
            continue
        if name == ("items",):
            # on the host
            assert torch.equal(found[name], right)
            continue
        assert (found[name].dtype, found[name].shape) == (right.dtype, right.shape), name
        pairs.append((name, torch.empty_like(right), right))
        device.own.do(lambda to, tensor: to.copy_(tensor), pairs[-1][1], found[name])
    return pairs


def assert_same(mine, wanted, device):
    """Check that minibatches on a device equal those of the CPU bit for bit."""
    seen, empty_types = [], set()
    for batch, want in zip(mine, wanted, strict=True):
        seen += read_by_model(batch, want, device)
        empty_types |= {name for name, nodes in want.nodes.items() if not len(nodes)}
        assert want.times.keys() == {"sample_s", "gather_s"}
        assert batch.times.keys() == {"sample_s"}
        del batch
    mine._transfer.close()
    device.finish()
    assert not device.faults
    for name, found, right in seen:
        assert torch.equal(found, right), name
    return empty_types


@pytest.mark.parametrize(
    ("kind", "share", "schedule"),
    [("nodes", share, each) for share in (0.0, 0.3, 1.0) for each in SCHEDULES]
    + [
        (kind, (0.0, 0.3, 1.0)[at % 3], SCHEDULES[(at + shift) % len(SCHEDULES)])
        for at, kind in enumerate(KINDS)
        for shift in (1, 4)
    ],
)
def test_minibatches_through_streams_equal_those_of_the_cpu(make, kind, share, schedule):
    device = Device(schedule)
    empty_types = assert_same(through(make(kind), device, share), make(kind), device)
    assert "city" in empty_types


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tables_may_be_cached_sparse_or_absent(make, tables, share):
    rows = tables["item"].gather(torch.arange(ITEMS))
    given = {
        "item": FeatureTable((rows * (rows > 0.5)).to_sparse_csr()),
        "user": cached(tables["user"], 0.2, torch.arange(USERS).float(), device="cpu"),
        "city": FeatureTable(torch.eye(5).to_sparse_csr()),
        "shop": FeatureTable(torch.randint(9, (SHOPS, 2))),
    }
    for own in ({}, given):
        device = Device("not side 2")
        assert_same(through(make(tables=own), device, share), make(tables=own), device)
    assert given["user"].counters().rows > 0


def test_each_type_is_gathered_by_one_launch_after_the_copy_of_all_ids(make):
    class Recorded(Device):
        work = ()

        def new(self, priority=0, name=None):
            stream = super().new(priority, name)
            queue = stream.do

            def do(work, *args):
                self.work += ((stream.name, work.__name__, len(args)),)
                queue(work, *args)

            stream.do = do
            return stream

    device = Recorded("eager")
    loader = through(make(threads=1, ahead=1), device)
    batch = next(iterator := iter(loader))
    iterator.close()
    # the ids of four types; then the edges and offsets, the rows and pairs of blocks, the labels
    copies = [work for work in device.work if work[0] == "side 1"]
    assert copies[0] == ("side 1", "_copy", 8)
    assert [work[1] for work in copies[:4]] == ["_copy"] * 4
    gathers = [place for place, work in enumerate(device.work) if work[1] == "_gather"]
    assert gathers[:3] == [1, 2, 3]
    assert {device.work[place][0] for place in gathers} == {"side 2"}
    assert [stage.name for stage in batch.stages] == ["gather", "copy"]
    loader._transfer.close()


def test_minibatches_may_be_waited_for_in_any_order_and_after_a_close(make, tables):
    device, loader = Device("lazy"), make()
    transfer = Transfer(device, tables, 0.3, max_pending=8)
    loader._host_pool = loader.sampler.pool = transfer.host
    wanted = list(make(shuffle=False))
    for is_closed in (False, True):
        seeds = [want.items for want in wanted]
        loader._transfer = None
        batches = [loader._sample(each, 0) for each in seeds]
        pending = []
        for batch, want in zip(batches, wanted, strict=True):
            batch.blocks, batch.items = want.blocks, want.items
            pending.append(transfer.start(batch))
        if is_closed:
            transfer.close()
        seen = []
        for number in (2, 0, 3, 1):
            batch = transfer.wait(pending[number])
            assert transfer.wait(pending[number]) is batch
            seen += read_by_model(batch, wanted[number], device)
        device.finish()
        assert not device.faults
        assert all(torch.equal(found, right) for _, found, right in seen)
    transfer.close()


def test_an_iterator_that_is_closed_early_leaves_its_minibatches_to_the_device(make):
    device = Device("not model")
    loader = through(make(), device, 0.3)
    wanted = list(make())
    seen = []
    for _ in range(3):
        iterator = iter(loader)
        seen += read_by_model(next(iterator), wanted[0], device)
        iterator.close()
        assert next(iterator, None) is None
        # the same epoch begins again, in memory that the device still reads
    seen += [
        each
        for got, want in zip(loader, wanted, strict=True)
        for each in read_by_model(got, want, device)
    ]
    loader._transfer.close()
    device.finish()
    assert not device.faults
    assert all(torch.equal(found, right) for _, found, right in seen)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Let loaders for "cuda" use a simulated device, which reads all memory of the host."""
    device = Device("not side 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(base, "CudaStreams", lambda _: device)
    monkeypatch.setattr(checks, "can_read_host", lambda _: True)
    return device


def test_a_loader_for_a_gpu_opens_its_transfer(make, fake_gpu, monkeypatch):
    wanted = make()
    with pytest.raises(ValueError, match=r"tables\['user'\]: a table on the host cannot be read"):
        make(device="cuda", copied_share=0.5)
    assert_same(make(device="cuda", copied_share=1.0), wanted, fake_gpu)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "is_pinned", lambda _: True)
        loader = make("links", device="cuda", copied_share=0.3, priority=-1)
        assert loader.device == GPU
        assert loader.sampler.pool is loader._transfer.host
        other = copy.deepcopy(loader)
        assert (other.copied_share, other.priority) == (0.3, -1)
        assert other._transfer is not loader._transfer
        assert_same(loader, make("links"), fake_gpu)


def test_rows_that_the_gpu_cannot_read_are_copied(make, fake_gpu, monkeypatch):
    monkeypatch.setattr(checks, "can_read_host", lambda _: False)
    loader = make(device="cuda")
    assert set(loader._transfer._shares.values()) == {1.0}
    assert_same(loader, make(), fake_gpu)


def test_a_minibatch_can_be_moved_with_all_its_tensors(make):
    for batch in make("temporal links"):
        moved = batch.to("meta")
        assert moved.items is batch.items
        for name, value in parts_of(moved).items():
            if isinstance(value, torch.Tensor) and name != ("items",):
                assert value.device.type == "meta", name


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_minibatches_equal_those_of_the_cpu(make, tables, kind, share):
    with ExitStack() as locks:
        locked = {name: locks.enter_context(pinned(own)) for name, own in tables.items()}
        loader = make(kind, device="cuda", tables=locked, copied_share=share)
        for mine, want in zip(loader, make(kind), strict=True):
            expected = parts_of(want)
            for name, found in parts_of(mine).items():
                if not isinstance(found, torch.Tensor):
                    assert found == expected[name], name
                    continue
                assert found.device.type == ("cpu" if name == ("items",) else "cuda"), name
                assert torch.equal(found.cpu(), expected[name]), name
