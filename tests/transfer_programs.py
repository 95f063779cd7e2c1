"""Random programs of `Transfer` and the loaders on a device that a happens-before checker watches.

A program is a function of its seed: sizes, the kind of the table, the share of copied rows, the
numbers of threads and of pending batches, the streams that read batches, which batches are dropped,
when and by which thread, and which call fails. It follows the rules that the documentation states
for users.
"""

import gc
import random
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from bits import tensors_of
from checked_device import Device, Failed, replacements
from cooperative_threads import Channel, Schedule, replaced
from hetero_graphs import pyg_sampler

from gcnzc.features.cache import cached
from gcnzc.features.table import FeatureTable
from gcnzc.graph import Graph
from gcnzc.kernels.gather.cached_rows import CachedRows
from gcnzc.loader import Loader
from gcnzc.loader import loader as loader_module
from gcnzc.loader import transfer as transfer_module
from gcnzc.sampling import LinkSampler
from gcnzc.sampling.batch import Batch, Block

NUM_NODES, NUM_COLUMNS = 64, 6
KINDS = ("float32", "int8", "codes", "columns", "cached", "on the device", "sparse", None)
FIXED_SHARES = {"sparse": 1.0, "on the device": 0.0}


@lru_cache(maxsize=1)
def graph():
    generator = torch.Generator().manual_seed(1)
    return Graph.from_edges(*torch.randint(NUM_NODES, (2, 300), generator=generator), NUM_NODES)


@lru_cache(maxsize=len(KINDS))
def host_table(kind):
    """Return a table of features on the host."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(NUM_NODES, NUM_COLUMNS, generator=generator)
    if kind in ("codes", "columns"):
        return FeatureTable.quantized(rows, scale_columns=3 if kind == "columns" else None)
    if kind == "cached":
        return cached(FeatureTable(rows), 0.3, torch.rand(NUM_NODES), device="cpu")
    if kind == "sparse":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support")
            return FeatureTable((rows * (rows > 1)).to_sparse_csr())
    return FeatureTable(rows.to(torch.int8) if kind == "int8" else rows)


@lru_cache(maxsize=1000)
def row_of(kind, node):
    """Return the features of a node."""
    return host_table(kind).gather(torch.tensor([node]))


def table_on(device, kind):
    """Return a table whose parts on the device are still being written by the model's stream."""
    table, written = host_table(kind), []

    def on_device(values):
        written.append((device.memory(values), values))
        return written[-1][0]

    if kind == "on the device":
        table = replace(table, rows=on_device(table.rows))
    elif kind == "cached":
        slots = on_device(torch.zeros(NUM_NODES, dtype=torch.int32))
        table = replace(table, copies=CachedRows(slots, on_device(torch.zeros(4, 128))))
    elif table.scales is not None:
        table = replace(table, scales=on_device(table.scales))
    for there, values in written:
        device.own.do(there.copy_, values)
    return table


class Program:
    """What programs have in common: streams that read batches, and the ends of batches."""

    def __init__(self, seed, without=None):
        self.draw = draw = random.Random(f"program {seed}")
        self.device = checked(seed, without)
        self.schedule = self.device.schedule
        self.kind = draw.choice(KINDS)
        share = draw.choice([0.0, 0.0, 0.3, 0.6, 1.0])
        self.share = FIXED_SHARES.get(self.kind, share)
        names = ("model", "model of a second thread", "model of a third thread")
        readers = [self.device.own, *(self.device.new(name=name) for name in names[1:])]
        self.readers = readers[: draw.randint(1, 3)]
        self.dropped = Channel()
        self.num_read, self.error = 0, None

    def table(self):
        """Return the features on the device; from now on the device may fail."""
        table = self.features(lambda kind: table_on(self.device, kind))
        if self.draw.random() < 0.2:
            self.device.fails_in = self.draw.randrange(100)
        return table

    def features(self, make):
        """Return a table that `make` returns for its kind, or a dict by node type."""
        return None if self.kind is None else make(self.kind)

    def start(self, name, work, *args):
        """Start a thread."""
        self.schedule.start(name, lambda: work(*args))

    def use(self, batch, reader):
        """Queue work of a model with a batch."""

        def work():
            self.device.read(*tensors_of(batch))
            self.check(batch)
            if batch.x is not None and self.draw.random() < 0.3:
                # activations in place
                self.device.write(*tensors_of(batch.x))

        reader.do(work)
        if self.draw.random() < 0.2:
            other = self.draw.choice(self.readers)
            other.wait(reader.record())
            other.do(work)
            reader.wait(other.record())
        self.num_read += 1

    def check(self, batch):
        """Check values of a batch; a subclass knows them."""

    def end(self, batch, kept):
        """Drop a batch now, later, in another thread, or leave it to the garbage collector."""
        how = self.draw.randrange(8)
        if how == 0:
            self.dropped.put(batch)
        elif how == 1:
            batch.itself = batch
        elif how in (2, 3, 4):
            kept.append(batch)
        del batch
        del kept[: max(0, len(kept) - self.draw.randint(0, 3))]
        if self.draw.random() < 0.1:
            gc.collect()

    def drop_others(self):
        """A thread that drops batches of other threads."""
        while (batch := self.dropped.get()) is not None:
            self.schedule.switch()
            del batch


class TransferProgram(Program):
    """Threads that copy batches, and threads that read them."""

    def run(self):
        draw, device = self.draw, self.device
        table = self.table()
        options = {"max_pending": draw.randint(1, 4)}
        self.transfer = transfer_module.Transfer(device, table, self.share, **options)
        self.transfer.order_after_current_stream()
        self.pending = Channel()
        numbers = iter(range(draw.randint(4, 8)))
        producers, num_producers = [], draw.randint(1, 3)
        for number in range(num_producers):
            self.start(f"producer {number}", self.produce, numbers, producers)
        consumers = []
        for number, reader in enumerate(self.readers):
            self.start(f"consumer {number}", self.consume, reader, consumers)
        self.start("dropper", self.drop_others)
        if draw.random() < 0.3:
            self.start("closer", self.close_often)
        self.schedule.wait_until(lambda: len(producers) == num_producers)
        self.pending.close()
        self.schedule.wait_until(lambda: len(consumers) == len(self.readers))
        self.dropped.close()
        self.schedule.join_all()
        if draw.random() < 0.5:
            self.transfer.close()
        del self.transfer, self.pending
        gc.collect()

    def close_often(self):
        """A thread that waits for the copies of other threads."""
        while not self.pending.is_closed:
            self.schedule.yield_now()
            self.transfer.close()

    def produce(self, numbers, ended):
        for number in numbers:
            try:
                pending_batch = self.transfer.start(self.batch(number))
            except Failed:
                continue
            except IndexError as error:
                if "is not in a table" not in str(error):
                    raise
                continue
            if self.draw.random() < 0.8:
                self.pending.put(pending_batch)
            # or drop it without `wait`, as when an epoch is stopped early
            del pending_batch
        ended.append(True)

    def batch(self, number):
        draw, empty = self.draw, self.transfer.host.empty
        size = draw.choice([0, 1, 5, 9, 13, 40])

        def values(shape, dtype=torch.int64):
            tensor = empty(shape, dtype)
            self.device.write(tensor)
            return tensor

        nodes = empty(size, torch.int64)
        # an id out of range is an error in the middle of the transfer
        nodes.fill_(NUM_NODES if draw.random() < 0.05 else number)
        self.device.write(nodes)
        has = [draw.random() < 0.5 for _ in range(3)]
        degrees = values(size) if has[0] else None
        blocks = [
            Block(
                *(values(num_dst + 1), values(2 * size, torch.int32), size, num_dst, nodes),
                edge_ids=values(2 * size) if has[1] else None,
                degrees=degrees,
            )
            for num_dst in (size // 2, size // 4)[: 1 + (draw.random() < 0.2)]
        ]
        y = values(size // 2) if has[2] else None
        return Batch(nodes, nodes[: size // 2], tuple(blocks), y=y)

    def check(self, batch):
        # all nodes of a batch are the same
        ids = batch.nodes.unique().tolist()
        assert len(ids) <= 1, "ids were not copied"
        if batch.x is not None and ids:
            assert (batch.x == row_of(self.kind, ids[0])).all(), "rows were not gathered"

    def consume(self, reader, ended):
        self.device.set_current(reader)
        kept = []
        while (pending_batch := self.pending.get()) is not None:
            try:
                batch = self.transfer.wait(pending_batch)
                del pending_batch
                self.use(batch, reader)
            except Failed:
                continue
            self.end(batch, kept)
            del batch
        ended.append(True)


class LoaderProgram(Program):
    """A loader whose iterators are read by one or more threads."""

    def run(self):
        draw, table = self.draw, self.table()
        options = self.options()
        loader = send_through(self.loader(table, options), self.device, table, self.share)
        # minibatches on the host
        self.reference = self.loader(self.features(host_table), options)
        self.reference._host_pool = self.reference.sampler.pool = PlainMemory
        self.start("dropper", self.drop_others)
        for self.epoch in range(draw.randint(1, 2)):
            loader.set_epoch(self.epoch)
            iterator, ended = iter(loader), []
            limit = draw.choice([1, 3, 100, 100])
            for number, reader in enumerate(self.readers):
                self.start(f"reader {number}", self.read, iterator, reader, limit, ended)
            del iterator
            self.schedule.wait_until(lambda ended=ended: len(ended) == len(self.readers))
            if draw.random() < 0.3:
                gc.collect()
        self.dropped.close()
        self.schedule.join_all()
        if draw.random() < 0.5:
            loader._transfer.close()
        del loader, table
        gc.collect()

    def options(self):
        """Return random options of a loader for the CPU."""
        draw = self.draw
        return {
            "fanouts": [2, 2][: draw.randint(1, 2)],
            "batch_size": draw.choice([3, 5, 8, 16]),
            "labels": torch.arange(NUM_NODES) if draw.random() < 0.5 else None,
            "threads": draw.randint(1, 3),
            "ahead": draw.randint(1, 4),
            "in_degrees": draw.random() < 0.5,
        }

    def loader(self, table, options):
        seeds = torch.arange(0, NUM_NODES, 2)
        return loader_module.Loader(graph(), table, seeds, **options)

    def check(self, batch):
        expected = tensors_of(self.reference._prepare(batch.items, self.epoch))
        for found, wanted in zip(tensors_of(batch), expected, strict=True):
            assert torch.equal(found, wanted)

    def read(self, iterator, reader, limit, ended):
        self.device.set_current(reader)
        kept = []
        try:
            # not by `enumerate`, which refers to the last item until the next one
            while limit and (batch := next(iterator, None)) is not None:
                limit -= 1
                self.use(batch, reader)
                self.end(batch, kept)
                del batch
        except Failed:
            iterator.close()
        del iterator
        ended.append(True)


class PlainMemory:
    """Allocates without the lock of a pool, at which threads would change."""

    empty = staticmethod(lambda shape, dtype=torch.float32: torch.empty(shape, dtype=dtype))


class TypedLoaderProgram(LoaderProgram):
    """A loader of a graph with several node types."""

    def features(self, make):
        kinds = self.kinds
        return {name: make(kind) for name, kind in kinds.items() if kind is not None}

    def table(self):
        self.kinds = {"user": self.kind, "item": self.draw.choice(KINDS), "city": "float32"}
        kinds = self.kinds.items()
        self.share = {name: FIXED_SHARES.get(kind, self.share) for name, kind in kinds}
        return super().table()

    def options(self):
        draw = self.draw
        return {
            "kind": draw.choice([*TYPED]),
            "hops": draw.randint(1, 2),
            "batch_size": draw.choice([3, 5, 8]),
            "threads": draw.randint(1, 3),
            "ahead": draw.randint(1, 4),
        }

    def loader(self, tables, options):
        return typed_loader(**options, tables=tables)


# options of the sampler
TYPED = {
    "nodes": {},
    "without edge ids": {"edge_ids": False},
    "disjoint": {"disjoint": True},
    "temporal": {"temporal": "last", "time": "edge"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "induced": {"subgraph_type": "induced"},
    "links": {},
    "temporal links": {"temporal": "uniform", "time": "edge"},
}
BUYS = ("user", "buys", "item")


@lru_cache(maxsize=1)
def typed_graph():
    """A graph with a node type that no minibatch has, and one that few have."""
    draw = np.random.default_rng(4)
    pairs, times = draw.integers(0, NUM_NODES, (2, 300)), draw.integers(0, 50, 300)
    few = np.stack([draw.integers(0, 8, 20), draw.integers(0, NUM_NODES, 20)])
    return Graph.from_arrays(
        {"user": NUM_NODES, "item": NUM_NODES, "shop": 8, "city": NUM_NODES},
        {
            BUYS: {"edge_index": pairs, "time": times},
            ("item", "rev_buys", "user"): {"edge_index": pairs[::-1], "time": times},
            ("user", "knows", "user"): {"edge_index": draw.integers(0, NUM_NODES, (2, 150))},
            ("shop", "sells", "item"): {"edge_index": few},
            ("shop", "visits", "shop"): {"edge_index": draw.integers(0, 8, (2, 9))},
        },
    )


def typed_loader(kind="nodes", hops=2, batch_size=8, **options):
    """Return a loader of typed minibatches of a kind of `TYPED`."""
    sampler = pyg_sampler(typed_graph(), [2] * hops, seed=1, **TYPED[kind])
    tables = options.pop("tables", None)
    if "links" in kind:
        items, sampler = torch.arange(0, 300, 12), LinkSampler(sampler, edge_type=BUYS)
        return Loader(typed_graph(), tables, items, (), batch_size, sampler=sampler, **options)
    ids = torch.arange(0, NUM_NODES, 3)
    if kind == "temporal":
        options["seed_times"] = torch.arange(len(ids)) * 2
    options |= {"labels": torch.arange(2 * len(ids)).view(-1, 2), "sampler": sampler}
    return Loader(typed_graph(), tables, ("user", ids), (), batch_size, **options)


def send_through(loader, device, table, share):
    """Let a loader for the CPU send its minibatches through the streams of a device."""
    loader._transfer = transfer_module.Transfer(device, table, share, max_pending=loader.ahead + 1)
    loader._host_pool = loader.sampler.pool = loader._transfer.host
    return loader


def checked(seed, without=None):
    """Return a device whose schedule the replaced threads, locks and queues use."""
    device = Device(seed, without)
    Schedule.active = device.schedule
    device.schedule.device = device
    return device


@contextmanager
def replaced_threads():
    """Let programs run: replace threads, locks and queues.

    Garbage is collected where the programs say.
    """
    gc.disable()
    try:
        with replaced(*replacements()):
            for kind in (TransferProgram, LoaderProgram, TypedLoaderProgram):
                # what is loaded at the first use exists until the end, and need not be searched
                run(kind, 0)
            gc.collect()
            gc.freeze()
            yield
    finally:
        # what is frozen remains so: it exists until the process ends
        gc.enable()
        Schedule.active = None


def run(kind, seed, without=None, *, may_fail=False):
    """Run a program, and return it.

    Args:
        kind: a subclass of `Program`.
        seed: of the program and of the order of its threads.
        without: the call to leave out, see `checked_device.Device`.
        may_fail: whether an error is the program's attribute `error`, and is not raised.
    """
    program = kind(seed, without)
    try:
        program.run()
    except BaseException as error:
        program.schedule.stop()
        # the first error is the one because of which others may have waited forever
        program.error = program.schedule.errors[0] if program.schedule.errors else error
    if program.error is not None and not may_fail:
        raise program.error
    return program
