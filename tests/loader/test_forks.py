"""Loaders in forked children."""

import pytest
from programs import run_python

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
