"""The loader yields every seed once, the same batches for any number of threads."""

import gc
import itertools
import threading
import time
import traceback
import weakref
from dataclasses import replace

import pytest
import torch
from bits import same_tensors
from limits import HANG_S
from programs import run_python

from gcnzc.features.pinning import pinned
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import EDGE, Graph
from gcnzc.loader.loader import Loader
from gcnzc.loader.seeds import Shares, epoch_order
from gcnzc.loader.transfer import _BatchMemory
from gcnzc.sampling.link import LinkSampler
from gcnzc.sampling.neighbor import Sampler

NUM_NODES = 3000


@pytest.fixture(scope="module")
def graph():
    generator = torch.Generator().manual_seed(1)
    src, dst = torch.randint(NUM_NODES, (2, 20 * NUM_NODES), generator=generator)
    return Graph.from_edges(src, dst, NUM_NODES)


@pytest.fixture(scope="module")
def table():
    return FeatureTable(torch.randn(NUM_NODES, 25, generator=torch.Generator().manual_seed(2)))


@pytest.fixture(scope="module")
def labels():
    return torch.arange(NUM_NODES) % 7


@pytest.fixture
def make(graph, table, labels):
    def make(**options):
        given = {
            "seeds": torch.arange(0, NUM_NODES, 3),
            "fanouts": [3, 2],
            "batch_size": 64,
            "labels": labels,
            "threads": 2,
        } | options
        return Loader(graph, given.pop("table", table), **given)

    return make


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("gcnzc-loader")]


class Slow:
    """A sampler that counts who is inside, and fails when told to."""

    def __init__(self, graph, *, fail_at=None, error=OSError, seconds=0.0):
        self.inner = Sampler(graph, [2])
        self.fail_at, self.error, self.seconds = fail_at, error, seconds
        self.calls = self.inside = self.most = 0
        self.lock = threading.Lock()

    def sample(self, seeds, epoch):
        with self.lock:
            self.calls += 1
            call = self.calls
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(self.seconds)
        with self.lock:
            self.inside -= 1
        if call == self.fail_at:
            raise self.error("the disk is gone")
        return self.inner.sample(seeds, epoch)


# what is in a batch


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_batches_equal_those_of_sampler_and_gather(make, graph, table, labels, threads):
    loader = make(threads=threads, seed=5)
    sampler = Sampler(graph, [3, 2], seed=5)
    for epoch in range(2):
        shuffled = epoch_order(loader.seeds, 5, epoch)
        batches = list(loader)
        assert len(batches) == len(loader) == 16
        for step, batch in enumerate(batches):
            want = sampler.sample(shuffled[64 * step : 64 * (step + 1)], epoch)
            want.x, want.y = table.rows[want.nodes], labels[want.seeds]
            assert same_tensors(batch, want)
            assert batch.times.keys() == {"sample_s", "gather_s"}
            assert all(seconds > 0 for seconds in batch.times.values())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_table_is_supported(make, table):
    sparse = FeatureTable(table.rows.clamp(min=1).sub(1).to_sparse_csr())
    batch = next(iter(make(table=sparse)))
    assert torch.equal(batch.x, table.rows.clamp(min=1).sub(1)[batch.nodes])


# order


def test_order_is_a_permutation_keyed_by_seed_and_epoch():
    seeds = torch.arange(1000) * 3
    orders = {
        tuple(epoch_order(seeds, s, e).tolist()) for s in (0, 1, 2, -1, 2**63) for e in range(3)
    }
    assert len(orders) == 15
    assert all(sorted(o) == seeds.tolist() for o in orders)
    assert torch.equal(epoch_order(seeds, 1, 2), epoch_order(seeds, 1, 2))
    # no place prefers a seed: with 2000 epochs each of 5 seeds comes first 400 times, give or take
    first = torch.stack([epoch_order(torch.arange(5), 0, e) for e in range(2000)])
    for place in range(5):
        assert (first[:, place].bincount(minlength=5) - 400).abs().max() < 5 * 400**0.5


def test_order_does_not_touch_the_global_generators(make):
    before = torch.get_rng_state()
    list(make())
    assert torch.equal(torch.get_rng_state(), before)


def test_without_shuffling_the_order_is_kept(make):
    loader = make(shuffle=False)
    assert torch.equal(torch.cat([batch.seeds for batch in loader]), loader.seeds)


def test_drop_last_omits_the_last_batch(make):
    loader = make(drop_last=True)
    assert [len(batch.seeds) for batch in loader] == [64] * 15 == [64] * len(loader)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [2, 5, 64])
@pytest.mark.parametrize("num_seeds", [8, 9, 17, 63, 64, 65, 128, 129, 1000])
def test_ranks_cover_every_seed_once_in_the_same_number_of_steps(num_seeds, batch_size, world_size):
    workers = [Shares(num_seeds, batch_size, r, world_size) for r in range(world_size)]
    steps = -(-num_seeds // (batch_size * world_size))
    taken = []
    for step in range(steps):
        sizes = []
        for worker in workers:
            part = range(num_seeds)[worker.seed_range(step)]
            taken += part
            sizes.append(len(part))
        assert min(sizes) >= 1
        assert max(sizes) <= min(batch_size, min(sizes) + 1)
        assert step >= steps - 2 or set(sizes) == {batch_size}
    assert taken == list(range(num_seeds))
    assert {len(worker) for worker in workers} == {steps}
    full = num_seeds // (batch_size * world_size)
    if full:
        dropping = Shares(num_seeds, batch_size, 0, world_size, drop_last=True)
        assert len(dropping) == full
        assert all(len(range(num_seeds)[dropping.seed_range(k)]) == batch_size for k in range(full))


def test_ranks_together_have_the_batches_of_one(make):
    alone = [batch.seeds for batch in make(batch_size=60)]
    ranks = [make(batch_size=20, rank=rank, world_size=3) for rank in range(3)]
    together = [torch.cat([b.seeds for b in step]) for step in zip(*ranks, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


# state


def test_a_rank_without_a_seed_gets_an_empty_batch(make):
    state = make(batch_size=999).state_dict() | {"position": 1}
    sizes = []
    for rank in range(3):
        loader = make(batch_size=50, rank=rank, world_size=3)
        loader.load_state_dict(state)
        (batch,) = loader
        sizes.append(len(batch.seeds))
        assert batch.x.shape == (len(batch.nodes), batch.x.shape[1])
        assert len(batch.y) == len(batch.seeds)
    assert sorted(sizes) == [0, 0, 1]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"seed": 1}, "seed 0, not 1"),
        ({"seeds": torch.arange(10)}, "num_seeds 1000, not 10"),
        ({"shuffle": False}, "shuffle 1, not 0"),
        ({"drop_last": True}, "drop_last 0, not 1"),
        ({"seeds": torch.arange(1000)}, "seeds_crc32"),
        ({"fanouts": [3, 3]}, r"fanouts \[3, 2\], not \[3, 3\]"),
    ],
)
def test_the_state_of_another_loader_is_rejected(make, other, name):
    with pytest.raises(ValueError, match=rf"(?s){name}.*\n\nhint: "):
        make(**other).load_state_dict(make().state_dict())


def test_an_invalid_state_is_rejected(make):
    loader = make()
    with pytest.raises(ValueError, match=r"lacks batch_size(?s:.*)hint: "):
        loader.load_state_dict({"epoch": 1, "position": 0})
    with pytest.raises(ValueError, match=r"\['position'\] is 17, but the epoch has 16"):
        loader.load_state_dict(loader.state_dict() | {"position": 17})
    with pytest.raises(ValueError, match=r"state\['epoch'\] is -1"):
        loader.load_state_dict(loader.state_dict() | {"epoch": -1})


def test_a_state_without_a_setting_is_rejected(make):
    state = make().state_dict()
    del state["fanouts"]
    with pytest.raises(ValueError, match="the state lacks fanouts\n\nhint: "):
        make().load_state_dict(state)


# threads


def test_break_leaves_no_threads(make):
    for _ in make():
        assert loader_threads()
        break
    assert loader_threads() == []


def test_closing_leaves_no_threads_and_no_batches(make):
    loader = make()
    batches = iter(loader)
    next(batches)
    batches.close()
    assert loader_threads() == []
    assert next(batches, None) is None
    assert loader.epoch == 0
    assert loader.state_dict()["position"] == 1


def test_an_error_of_the_consumer_leaves_no_threads(make):
    def consume():
        for _ in make():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        consume()
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert loader_threads() == []


def test_an_error_of_a_thread_is_raised_in_the_order_of_batches(make, graph):
    sampler = Slow(graph, fail_at=4)
    loader = make(sampler=sampler, threads=1)
    done = []
    with pytest.raises(OSError, match="the disk is gone") as caught:
        done.extend(loader)
    assert len(done) == 3
    assert "raise self.error" in "".join(traceback.format_exception(caught.value))
    assert loader_threads() == []
    assert loader.epoch == 0
    assert loader.state_dict()["position"] == 3
    # nothing is broken for good
    assert len(list(loader)) == 16
    # which would otherwise end the epoch early
    with pytest.raises(RuntimeError, match="the sampler raised StopIteration"):
        list(make(sampler=Slow(graph, fail_at=4, error=StopIteration)))


def test_writing_into_a_batch_changes_neither_the_seeds_nor_later_epochs(make):
    seeds = torch.arange(0, NUM_NODES, 3)
    loader = make(seeds=seeds, shuffle=False)
    for batch in loader:
        for tensor in (batch.items, batch.seeds, batch.nodes):
            tensor.zero_()
    assert torch.equal(seeds, torch.arange(0, NUM_NODES, 3))
    assert torch.equal(torch.cat([batch.seeds for batch in loader]), seeds)


def test_memory_in_flight_is_bounded(make, graph):
    made = []

    class Seen(Slow):
        def sample(self, seeds, epoch):
            batch = super().sample(seeds, epoch)
            made.append(weakref.ref(batch))
            return batch

    sampler = Seen(graph)
    for step, batch in enumerate(make(sampler=sampler, threads=2, ahead=3)):
        time.sleep(0.01)
        assert sampler.calls <= step + 1 + 3
        assert batch is not None
        assert sum(ref() is not None for ref in made) <= 1 + 3
    assert sampler.calls == 16


def test_batches_are_prepared_in_parallel(make, graph):
    together, calls = threading.Barrier(3), itertools.count()

    class Together(Sampler):
        def sample(self, seeds, epoch):
            # no batch is finished before three of them have begun
            if next(calls) < 3:
                together.wait(HANG_S)
            return super().sample(seeds, epoch)

    assert len(list(make(sampler=Together(graph, [2]), threads=3, ahead=6))) == 16


def test_a_sampler_that_is_not_thread_safe_is_used_by_one_thread(make, graph):
    sampler = Slow(graph, seconds=0.002)
    sampler.thread_safe = False
    loader = make(sampler=sampler, threads=4)
    assert loader.threads == 1
    assert len(list(zip(loader, loader, strict=True))) == 16
    assert sampler.calls == 32
    assert sampler.most == 1


def test_the_default_number_of_threads_depends_on_the_cores(make, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for cores, threads in [(1, 1), (2, 2), (64, 4), (None, 1)]:
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        loader = make(threads=None)
        assert (loader.threads, loader.ahead) == (threads, threads + 1)


def test_ranks_on_one_machine_share_its_cores(make, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert [make(threads=None, world_size=workers).threads for workers in (2, 3, 8)] == [3, 2, 1]
    # of sixteen workers two are here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert make(threads=None, world_size=16).threads == 3
    assert make(threads=None, world_size=1).threads == 3


INTERRUPTED = """
import os, signal, sys, threading, time
import torch
from gcnzc.loader import loader as module
from gcnzc.graph import Graph
from gcnzc.loader import Loader
from gcnzc.sampling import Sampler
from gcnzc.features import FeatureTable

# a shell's background jobs ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow(Sampler):
    def sample(self, seeds, epoch):
        time.sleep(WAIT)
        return super().sample(seeds, epoch)

src, dst = torch.randint(500, (2, 5000))
graph = Graph.from_edges(src, dst, 500)
table = FeatureTable(torch.zeros(500, 8))
loader = Loader(graph, table, torch.arange(500), [2], 5, sampler=Slow(graph, [2]), threads=2)
try:
    for step, batch in enumerate(loader):
        if step == 1:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        END
except KeyboardInterrupt:
    print("interrupted after", loader.state_dict()["position"])
batch = None
left = [t.name for t in threading.enumerate() if t.name.startswith("gcnzc-loader")]
print("left", left)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("wait", "model"), [("0.3", "pass"), ("0", "time.sleep(0.1)")], ids=["waiting", "computing"]
)
def test_ctrl_c_ends_a_loop(wait, model):
    program = INTERRUPTED.replace("WAIT", wait).replace("END", model)
    run = run_python("-c", program)
    assert "interrupted after" in run.stdout
    assert "left []" in run.stdout
    assert run.stderr == ""


@pytest.mark.processes
def test_a_process_can_end_with_prefetched_batches():
    # of an iterator that a module keeps
    program = INTERRUPTED.replace("WAIT", "0.05")
    program = (
        program[: program.index("try:")] + "batches = iter(loader)\nnext(batches)\nsys.exit(3)"
    )
    run = run_python("-c", program)
    assert run.returncode == 3
    assert run.stderr == ""


# what makes no sense


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": torch.empty(0, dtype=torch.int64)}, "no seeds"),
        ({"seeds": torch.tensor([1, 2, 1, 2])}, r"seed 1 occurs twice \(2 seeds"),
        ({"seeds": torch.tensor([0, NUM_NODES])}, "from 0 to 3000, but the graph has 3000"),
        ({"seeds": torch.tensor([-1, 5])}, "from -1 to 5"),
        ({"fanouts": [3, -2]}, r"fanouts\[1\] is -2"),
        ({"rank": 2, "world_size": 2}, "rank is 2 with a world_size of 2"),
        ({"world_size": 1001}, "1000 seeds for 1001 ranks"),
        ({"batch_size": 1, "world_size": 3}, "1 are left"),
        ({"batch_size": 1001, "drop_last": True}, "do not fill one step"),
        ({"table": FeatureTable(torch.zeros(5, 3))}, "table has 5 rows, but the graph 3000"),
        ({"labels": torch.zeros(5)}, r"labels of shape \(5,\) for 3000 nodes"),
        ({"device": "meta"}, "device meta"),
    ],
)
def test_invalid_arguments_are_rejected(make, options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_as_seeds_is_rejected_with_a_remedy(make, dtype):
    with pytest.raises(ValueError, match=r"hint: .*mask.*\.nonzero\(\)|hint: .*nonzero.* mask"):
        make(seeds=torch.ones(NUM_NODES, dtype=dtype))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_a_missing_gpu_is_reported(make):
    with pytest.raises(ValueError, match=r"(?s)torch.cuda.is_available\(\) is False\n\nhint: "):
        make(device="cuda")


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("where", "share", "priority"),
    [("host", 0.0, 0), ("host", 0.4, -1), ("host", 1.0, 0), ("device", 0.0, -1)],
)
def test_gpu_batches_equal_those_of_the_cpu(make, table, device, where, share, priority):
    there = pinned(table.rows) if where == "host" else pinned(table.rows.to(device))
    with there as rows:
        loader = make(device=device, table=rows, copied_share=share, priority=priority)
        for mine, want in zip(loader, make(), strict=True):
            assert mine.x.device == mine.nodes.device == mine.y.device
            assert mine.x.device.type == mine.blocks[0].indices.device.type == "cuda"
            assert same_tensors(mine, want)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_gpu_memory_is_not_reused_before_the_model_has_finished(
    make, table, device, share, monkeypatch
):
    lend = _BatchMemory.empty

    def poisoned(memory, shape, dtype, *writers):
        """As soon as it is allowed, whoever is lent memory writes over all of it."""
        tensor = lend(memory, shape, dtype, *writers)
        writers[0].do(lambda: tensor.view(torch.uint8).fill_(255) if tensor.numel() else None)
        for other in writers[1:]:
            other.wait(writers[0].record())
        return tensor

    monkeypatch.setattr(_BatchMemory, "empty", poisoned)
    with pinned(table.rows) as rows:
        loader = make(device=device, table=rows, batch_size=100, threads=4, copied_share=share)
        sums = []
        for batch in loader:
            # the model's stream is far behind when the batch is dropped
            torch.cuda._sleep(20_000_000)
            sums.append((batch.nodes.clone(), batch.x.clone()))
            del batch
            # whoever takes over memory of the allocator writes over it at once, too
            with torch.cuda.stream(torch.cuda.Stream(device)):
                torch.full((100 * 25 * 16,), float("nan"), device=device)
        for nodes, x in sums:
            assert torch.equal(x.cpu(), table.rows[nodes.cpu()])


@pytest.mark.parametrize(
    "options",
    [
        {"replace": True},
        {"weighted": True},
        {"disjoint": True},
        {"temporal": "last", "time": "edge"},
    ],
)
def test_pairs_of_any_sampler_have_features(options, graph, table):
    edges, size = torch.stack(graph.coo())[:, :40].long(), graph.num_edges
    store = replace(graph.edges(), weight=torch.ones(size), time=torch.zeros(size).long())
    timed = graph.with_edges({EDGE: store})
    times = torch.ones(40).long() if "temporal" in options else None
    sampler = LinkSampler(Sampler(timed, [3, 3], **options), edges, times=times)
    for batch in Loader(timed, table, None, (), 8, sampler=sampler):
        nodes, num_edges = batch.nodes["node"], len(batch.items)
        assert torch.equal(batch.x["node"], table.rows[nodes])
        assert torch.equal(nodes[batch.pairs][:, :num_edges], edges[:, batch.items])
        assert batch.y.tolist() == [1.0] * num_edges + [0.0] * num_edges
        assert len(batch.blocks) == 2


@pytest.mark.parametrize("kind", ["induced", "bidirectional"])
def test_subgraphs_without_blocks_are_rejected(kind, make, graph):
    with pytest.raises(ValueError, match=f"{kind}.*needs blocks"):
        make(sampler=Sampler(graph, [3, 2], subgraph_type=kind))


def test_seeds_without_types_have_the_times_of_their_nodes(graph):
    nodes = replace(graph.nodes("node"), time=torch.zeros(NUM_NODES).long())
    timed = graph.with_nodes({"node": nodes})
    sampler = Sampler(timed, [3, 2], temporal="uniform", time="node")
    with pytest.raises(ValueError, match="have the times of their nodes"):
        Loader(timed, None, [1, 2], (), 2, sampler=sampler, seed_times=[3, 4])


@pytest.mark.gpu
def test_gpu_stages_have_spans_between_the_calls(make, table, device):
    with pinned(table.rows) as rows:
        loader = make(device=device, table=rows, copied_share=0.3)
        began_s = time.perf_counter()
        stages = [stage for batch in loader for stage in batch.stages]
        torch.cuda.synchronize()
        ended_s = time.perf_counter()
    for stage in stages:
        span = stage.span()
        assert stage.is_done()
        assert began_s - 0.01 < span.begin_s <= span.end_s < ended_s + 0.01
        assert stage.seconds() == pytest.approx(span.end_s - span.begin_s, abs=1e-4)


@pytest.mark.gpu
def test_a_table_that_is_not_page_locked_is_rejected_for_a_gpu(make, device):
    with pytest.raises(ValueError, match=r"gcnzc\.pinned"):
        make(device=device)
