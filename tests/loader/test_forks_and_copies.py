"""Loaders in forked children, shared by threads, and copied."""

import copy
import pickle
import threading
import time

import pytest
import torch
from limits import HANG_S
from programs import run_python

from gcnzc.features.cache import cached
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.loader.loader import Loader
from gcnzc.sampling.link import LinkSampler

NUM_NODES = 600

# A process of its own, since pytest's has threads. The seeds are so many that torch's own indexing
# would use threads of OpenMP, which the child does not have.
FORKS = """
import faulthandler, os, signal, threading, traceback
import torch
from gcnzc import Graph, Loader, Sampler, pinned
from gcnzc.kernels.threads import ForkSafeLock

N = 40_000
torch.set_num_threads(2)
torch.randn(1_000_000)[torch.arange(1_000_000)]
src, dst = torch.randint(N, (2, 4 * N), generator=torch.Generator().manual_seed(0))
graph = Graph.from_edges(src, dst, N)
rows = torch.arange(3.0 * N).view(N, 3)

class OneByOne:
    thread_safe = False
    inner = Sampler(graph, [2])
    is_sampling, may_end = threading.Event(), threading.Event()

    def sample(self, seeds, epoch):
        self.is_sampling.set()
        self.may_end.wait()
        return self.inner.sample(seeds, epoch)

def in_child(name, deed):
    print(name, end=": ", flush=True)
    if os.fork() == 0:
        signal.alarm(300)
        faulthandler.dump_traceback_later(290)
        try:
            print(deed(), flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.wait()[1]
    if status:
        print("status", status, flush=True)

def refusal(iterator):
    try:
        return f"gave {next(iterator)}"
    except RuntimeError as error:
        return str(error).replace("\\n", " ").replace(str(os.getppid()), "P")

def is_whole(loader):
    nodes = []
    for batch in loader:
        # by numpy, since torch's threads are not in the child
        assert (batch.x.numpy() == rows.numpy()[batch.nodes.numpy()]).all()
        nodes += batch.seeds.tolist()
    return sorted(nodes) == list(range(N))

with pinned(rows) as table:
    loader = Loader(graph, table, torch.arange(N), [2], batch_size=9_000, threads=2)
    iterator = iter(loader)
    next(iterator)
    in_child("iterator", lambda: refusal(iterator))
    in_child("dropped", lambda: [iterator.close()])
    in_child("loader", lambda: is_whole(loader))
    sampler = OneByOne()
    locked = Loader(graph, table, torch.arange(N), [], batch_size=9_000, sampler=sampler)
    waiting = iter(locked)
    sampler.is_sampling.wait()
    in_child("locked", lambda: [sampler.may_end.set(), is_whole(locked)][1])
    sampler.may_end.set()
    print("parent:", len(list(iterator)), len(list(waiting)))
lock, is_held, end = ForkSafeLock(), threading.Event(), threading.Event()

def hold():
    with lock:
        is_held.set()
        end.wait()

holder = threading.Thread(target=hold)
holder.start()
is_held.wait()
in_child("lock", lambda: lock.acquire())
print("parent:", lock.acquire(blocking=False))
end.set()
"""


@pytest.mark.processes
def test_a_forked_child_may_use_a_loader_but_no_iterator_of_its_parent():
    run = run_python("-W", "ignore", "-c", FORKS)
    assert run.returncode == 0, run.stderr
    found = dict(line.split(": ", 1) for line in run.stdout.splitlines()[:4])
    assert found["iterator"].startswith("this iterator belongs to process P, whose threads"), run
    assert "  hint: call iter(loader) in the child process" in found["iterator"]
    assert run.stdout.splitlines()[1:] == [
        *("dropped: [None]", "loader: True", "locked: True"),
        *("parent: 4 5", "lock: True", "parent: False"),
    ], run.stderr


@pytest.fixture(scope="module")
def graph():
    src, dst = torch.randint(NUM_NODES, (2, 5000), generator=torch.Generator().manual_seed(1))
    return Graph.from_edges(src, dst, NUM_NODES)


def make(graph, **options):
    table = FeatureTable(torch.arange(2.0 * NUM_NODES).view(-1, 2))
    given = {"table": table, "seeds": torch.arange(NUM_NODES), "fanouts": [3, 2]}
    return Loader(graph, **given | {"batch_size": 10, "threads": 2, "seed": 3} | options)


def test_each_batch_goes_to_one_of_the_threads_that_share_an_iterator(graph):
    loader = make(graph, labels=torch.arange(NUM_NODES))
    expected = sorted(tuple(batch.seeds.tolist()) for batch in make(graph))
    iterator, taken, errors = iter(loader), [], []

    def take():
        try:
            for batch in iterator:
                assert torch.equal(batch.y, batch.seeds)
                taken.append(tuple(batch.seeds.tolist()))
                # longer than a batch takes, so that threads meet at the end of the epoch
                time.sleep(0.002)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert errors == []
    assert sorted(taken) == expected
    assert loader.epoch == 1


def links(graph):
    edges = torch.stack(graph.edges())[:, :200].long()
    return {
        "seeds": torch.arange(200),
        "sampler": LinkSampler(graph, edges, [3]),
        "shuffle": False,
        "drop_last": True,
        "in_degrees": True,
    }


OPTIONS = {
    "nodes": lambda graph: {"labels": torch.arange(NUM_NODES), "rank": 1, "world_size": 2},
    "links": links,
    "cached": lambda graph: {
        "table": cached(FeatureTable(torch.rand(NUM_NODES, 4)), 0.1, torch.rand(NUM_NODES))
    },
}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_copy_continues_at_the_position_of_the_loader(graph, kind, copied):
    loader = make(graph, **OPTIONS[kind](graph))
    list(loader)
    batches = iter(loader)
    next(batches)
    again = copied(loader)
    assert (again.epoch, len(again), again.state_dict()) == (1, len(loader), loader.state_dict())
    assert again.graph is not loader.graph
    rest = [*batches, *loader]
    for batch, other in zip(rest, [*again, *again], strict=True):
        for name in ("nodes", "seeds", "x", "y", "pairs"):
            mine, theirs = getattr(batch, name), getattr(other, name)
            assert mine is theirs is None or torch.equal(mine, theirs), name
