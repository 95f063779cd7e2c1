"""Batches on a device are complete in any order of execution."""

import gc
from dataclasses import replace

import pytest
import torch
from queued_device import Device

from gcnzc import FeatureTable, Graph
from gcnzc.features.cache import cached
from gcnzc.loader.transfer import Transfer
from gcnzc.sampling.batch import Batch
from gcnzc.sampling.neighbor import Sampler

NUM_NODES = 3000
SIDES = ("model", "side 1", "side 2")
SCHEDULES = ("eager", "lazy", *(f"not {name}" for name in SIDES), *range(3))
FEW_SCHEDULES = ("lazy", "not model", 0)
# batches of different sizes, some so much larger that memory is released
SIZES = (30, 34, 4, 33, 31, 300, 5, 29, 32, 30, 40, 310, 32, 280, 6, 31, 33)
# batches that are dropped without `wait`, as when an epoch is stopped early
DROPPED = (7, 8, 12, len(SIZES) - 1)


@pytest.fixture(scope="module")
def graph():
    generator = torch.Generator().manual_seed(1)
    src, dst = torch.randint(NUM_NODES, (2, 20_000), generator=generator)
    return Graph.from_edges(src, dst, NUM_NODES)


def table_of(kind, num_columns=12):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(NUM_NODES, num_columns, generator=generator)
    if kind in ("codes", "columns"):
        return FeatureTable.quantized(rows, scale_columns=5 if kind == "columns" else None)
    if kind == "cached":
        return cached(FeatureTable(rows), 0.2, torch.rand(NUM_NODES, generator=generator))
    if kind == "sparse":
        return FeatureTable((rows * (rows > 1)).to_sparse_csr())
    return FeatureTable(rows.to(getattr(torch, kind)))


def tensors_of(batch):
    """Return every tensor of a batch, by name."""
    found = {"nodes": batch.nodes, "seeds": batch.seeds, "x": batch.x, "y": batch.y}
    found["pairs"] = batch.pairs
    for hop, block in enumerate(batch.blocks):
        found |= {
            f"{name}{hop}": getattr(block, name)
            for name in ("indptr", "indices", "nodes", "edge_ids", "degrees")
        }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


class Run:
    """Batches copied to a device, and whether they were complete when the model read them."""

    def __init__(self, graph, table, share, schedule):
        self.device = Device(schedule)
        self.source, self.share = table, share
        self.graph = graph
        self.sampler = Sampler(graph, [4, 3], seed=7, edge_ids=True)
        self.labels = torch.arange(graph.num_nodes) % 7
        self.seen = []  # what the model read, and the expected values

    def table(self):
        """Return the source, or if only the device reads it, a copy there that is still pending."""
        if self.share > 0:
            return self.source
        rows = self.source.rows
        there = self.device.memory(rows.nbytes).view(rows.dtype).view(rows.shape)
        self.device.own.do(lambda to, rows: to.copy_(rows), there, rows)
        return replace(self.source, rows=there)

    def batch(self, transfer, size, number):
        self.sampler.pool = transfer.host
        seeds = torch.arange(size) + number
        batch = self.sampler.sample(seeds, number)
        degrees = batch.blocks[0].in_degrees
        batch.blocks = tuple(
            replace(block, degrees=degrees[: block.num_src]) for block in batch.blocks
        )
        batch.y = torch.index_select(
            self.labels, 0, seeds, out=transfer.host.empty(size, torch.int64)
        )
        batch.pairs = transfer.host.empty((2, size), torch.int64).copy_(seeds.expand(2, size))
        want = {name: tensor.clone() for name, tensor in tensors_of(batch).items()}
        want["x"] = self.source.gather(batch.nodes)
        return batch, want

    def model(self, transfer, pending_batch, want):
        batch = transfer.wait(pending_batch)
        found = {name: torch.empty_like(tensor) for name, tensor in want.items()}
        assert found.keys() == tensors_of(batch).keys()
        for name, tensor in tensors_of(batch).items():
            self.device.own.do(lambda to, tensor: to.copy_(tensor), found[name], tensor)
        self.seen.append((found, want))

    def go(self, sizes=SIZES):
        table = self.table()
        transfer = Transfer(self.device, table, self.share, max_pending=3)
        transfer.order_after_current_stream()
        pending = []
        for number, size in enumerate(sizes):
            batch, want = self.batch(transfer, size, number)
            pending_batch = transfer.start(batch)
            del batch
            if number not in DROPPED:
                pending.append((pending_batch, want))
            del pending_batch
            if len(pending) > 2:
                self.model(transfer, *pending.pop(0))
        while pending:
            self.model(transfer, *pending.pop(0))
        transfer.close()
        self.sampler = None
        del transfer, table
        gc.collect()
        self.device.finish()
        return self

    def is_whole(self):
        return not self.device.faults and all(
            torch.equal(found[name], want[name]) for found, want in self.seen for name in want
        )


CASES = [("float32", 0.0), ("codes", 0.5)]
MORE_CASES = [
    ("float32", 0.4),
    ("float32", 1.0),
    ("float16", 0.7),
    ("bfloat16", 0.3),
    ("int8", 0.5),
    ("codes", 0.0),
    ("columns", 0.6),
    ("sparse", 1.0),
    ("cached", 0.5),
]


@pytest.mark.parametrize(
    ("kind", "share", "schedule"),
    [(*case, schedule) for case in CASES for schedule in SCHEDULES]
    # of each kind of rows one schedule, and more in `make test-all`
    + [(*case, FEW_SCHEDULES[at % 3]) for at, case in enumerate(MORE_CASES)]
    + [
        pytest.param(*case, schedule, marks=pytest.mark.slow)
        for at, case in enumerate(MORE_CASES)
        for schedule in FEW_SCHEDULES
        if schedule != FEW_SCHEDULES[at % 3]
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_batches_are_complete_in_any_order_of_execution(graph, kind, share, schedule):
    run = Run(graph, table_of(kind), share, schedule).go()
    assert not run.device.faults
    assert run.is_whole()
    assert len(run.seen) == len(SIZES) - len(DROPPED)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "codes", "columns"])
@pytest.mark.parametrize("num_columns", [1, 7, 33])
@pytest.mark.parametrize("cached_share", [None, 0.01, 0.5, 1.0])
def test_two_engines_give_the_same_rows_as_a_plain_gather(kind, num_columns, cached_share):
    table, device = table_of(kind, num_columns), Device("not model")
    if cached_share is not None:
        table = cached(table, cached_share, torch.arange(NUM_NODES), device="cpu")
    seen = []
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        transfer = Transfer(device, table, share)
        for num_ids in (0, 1, 2, 1000):
            ids = transfer.host.empty(num_ids, torch.int64).random_(NUM_NODES)
            want = table.gather(ids)
            pending_batch = transfer.start(Batch(ids, ids[:0], ()))
            x = transfer.wait(pending_batch).x
            assert x.dtype == table.dtype
            found = torch.empty_like(want)
            device.own.do(lambda to, x: to.copy_(x), found, x)
            seen.append((found, want))
        transfer.close()
    device.finish()
    assert not device.faults
    assert all(torch.equal(found, want) for found, want in seen)


@pytest.mark.parametrize("kind", ["codes", "columns", "float32"])
def test_no_thread_waits_for_the_device_while_it_queues_a_batch(graph, kind, monkeypatch):
    run = Run(graph, table_of(kind), 0.5, "eager")
    transfer = Transfer(run.device, run.source, 0.5)
    batch, want = run.batch(transfer, 30, 0)

    def copy_to_host(tensor):
        raise AssertionError("a copy to the host waits for all work of the stream")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "cpu", copy_to_host)
        pending_batch = transfer.start(batch)
    run.model(transfer, pending_batch, want)
    transfer.close()
    run.device.finish()
    assert run.is_whole()


def test_copied_rows_do_not_count_as_hits(graph):
    table = table_of("cached")
    run = Run(graph, table, 0.25, "eager").go()
    rows = copied = 0
    for size, number in zip(SIZES, range(len(SIZES)), strict=True):
        sampled = Sampler(graph, [4, 3], seed=7).sample(torch.arange(size) + number, number)
        rows += len(sampled.nodes)
        copied += round(0.25 * len(sampled.nodes))
    assert len(run.seen) > 0
    # the run's own check gathers them once more
    counters = table.counters()
    assert counters.rows == 2 * rows
    assert 0 < counters.hits < 2 * (rows - copied)


def test_stages_have_spans_after_they_end(graph):
    run = Run(graph, table_of("float32"), 0.5, "lazy")
    transfer = Transfer(run.device, run.source, 0.5)
    batch, _ = run.batch(transfer, 20, 0)
    pending_batch = transfer.start(batch)
    stages = {stage.name: stage for stage in pending_batch.batch.stages}
    assert stages.keys() == {"gather", "copy"}
    assert not any(stage.is_done() for stage in stages.values())
    spans = [stage.span() for stage in stages.values()]
    assert all(stage.is_done() for stage in stages.values())
    assert all(span.begin_s < span.end_s for span in spans)
    assert {span.lane for span in spans} == {"gather stream", "copy stream"}


def test_memory_of_a_failed_batch_is_kept_until_its_copies_end(graph):
    """Its queued copies still read host memory, which other batches must not overwrite."""
    table = table_of("float32")
    run = Run(graph, table, 0.5, "lazy")
    transfer = Transfer(run.device, FeatureTable(table.rows[:2000]), 0.5, max_pending=8)
    failed, _ = run.batch(transfer, 300, 0)
    assert failed.nodes.max() >= 2000
    with pytest.raises(IndexError, match="is not in a table of 2000 rows"):
        transfer.start(failed)
    want = failed.nodes.clone()
    del failed
    # the copy of the ids, which is still queued, is the first to read them
    others = [transfer.host.empty(len(want), torch.int64).fill_(-1) for _ in range(4)]
    [(copied, held)] = transfer._pending
    assert torch.equal(held[0], want)
    assert not copied.is_done()
    del others
    transfer.close()
