"""Time optimizers with uneven workers: over emulated machines, and in virtual time.

    python -m bench.network.uneven_strategies --record
    python -m bench.network.uneven_strategies --slow-worker 3:3 average DiLoCo
    python -m bench.network.uneven_strategies --slow-link 0-1:10 --virtual

Both run `train`: over the emulated machines of
bench/network/cluster.py, which needs root, or with `--virtual` in `lockstep` with
`Link.tcp`. A line of JSON for each method has the seconds of the steps of each worker.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count

import torch
from torch.nn.functional import cross_entropy

from bench.harness import record
from bench.network import tasks
from bench.network.cluster import Cluster
from bench.network.tasks import Line
from bench.network.uneven import check_workers, pair_rates, slow_link, slow_worker
from bench.strategies.compare import METHODS
from bench.strategies.task import Setup, dataset
from gcnzc import Loader
from gcnzc.exchange import (
    Algorithm,
    AllGather,
    AllGatherScalar,
    Compute,
    Group,
    Link,
    Now,
    lockstep,
)
from gcnzc.exchange.requests import yield_request
from gcnzc.models import SAGE
from gcnzc.sampling import Batch

MODULE = "bench.network.uneven_strategies"
DEFAULT_METHODS = ("average", "local SGD", "DiLoCo", "A2CiD2, overlapped", "backup workers")
LIMIT_S, TIMEOUT_S = 900.0, 300.0


@dataclass(frozen=True)
class Task:
    """A run of one method."""

    method: str
    """a name of `bench.strategies.compare.METHODS`"""
    workers: int
    steps: int
    """of each worker"""
    step_s: float
    """seconds of the computation of a step of a worker that is not slow; longer than the
    computation itself"""
    slow: dict[int, float]
    """by worker, how many times as slowly it computes"""
    seed: int = 0


def main(argv: Sequence[str] | None = None) -> None:
    """Run the methods of the command line, and print or record the results."""
    options = _options(argv)
    torch.set_num_threads(1)
    slow = dict(options.slow_worker)
    check_workers(options.workers, list(slow))
    rates = [options.mbit_per_s] * options.workers
    links = pair_rates(rates, dict(options.slow_link))
    chosen = [
        Task(method, options.workers, options.steps, options.step_s, slow)
        for method in options.methods or DEFAULT_METHODS
    ]
    run = _virtual_runs if options.virtual else _runs
    for task, seconds, sent in run(chosen, options, links):
        case = {
            "part": "uneven",
            "method": task.method,
            "clock": "virtual" if options.virtual else "wall",
            "workers": task.workers,
            "mbit_per_s": options.mbit_per_s,
            "delay_ms": options.delay_ms,
            "steps": task.steps,
            "step_s": task.step_s,
            "slow_workers": {str(rank): factor for rank, factor in task.slow.items()},
            "slow_links": {f"{a}-{b}": factor for (a, b), factor in options.slow_link},
        }
        found = {
            "slowest_s": max(seconds),
            "median_s": statistics.median(seconds),
            "seconds": seconds,
            "sent_bytes": sent,
        }
        if options.record:
            record("cluster", case, **found)
        else:
            print(json.dumps(case | found), flush=True)


Run = tuple[Task, list[float], int]


def _runs(
    chosen: Sequence[Task], options: argparse.Namespace, links: dict[tuple[int, int], float]
) -> Iterator[Run]:
    """Run the tasks over emulated machines."""
    own = [asdict(task) for task in chosen]
    with Cluster(options.workers, options.mbit_per_s, options.delay_ms, links) as cluster:
        for line in tasks.run_on(cluster, MODULE, own, LIMIT_S):
            seconds, sent = line.pop("seconds"), line.pop("sent_bytes")
            yield read_task(line), seconds, sent


def _virtual_runs(
    chosen: Sequence[Task], options: argparse.Namespace, links: dict[tuple[int, int], float]
) -> Iterator[Run]:
    """Run the tasks in virtual time."""
    link = Link.tcp(options.mbit_per_s, options.delay_ms / 1e3)
    of_pair = {pair: Link(Link.tcp(rate).bytes_per_s) for pair, rate in links.items()}
    for task in chosen:
        ranks = [train(task, Group(rank, task.workers)) for rank in range(task.workers)]
        outcome = lockstep(ranks, link, of_pair)
        yield task, outcome.results, outcome.ledgers[0].bytes_sent


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "methods", nargs="*", metavar="METHOD", help="; ".join(METHODS).replace("%", "%%")
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbit-per-s", type=float, default=50.0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--step-s", type=float, default=0.15)
    parser.add_argument(
        "--slow-worker", type=slow_worker, action="append", default=[], metavar="WORKER:FACTOR"
    )
    parser.add_argument(
        "--slow-link", type=slow_link, action="append", default=[], metavar="A-B:FACTOR"
    )
    parser.add_argument("--virtual", action="store_true", help="simulate, in virtual time")
    parser.add_argument(
        "--record", action="store_true", help="append the results to bench/results/cluster.jsonl"
    )
    options = parser.parse_args(argv)
    unknown = set(options.methods) - set(METHODS)
    if unknown:
        parser.error(f"no method {', '.join(sorted(unknown))}; use: {'; '.join(METHODS)}")
    return options


def train(task: Task, group: Group) -> Algorithm[float]:
    """Train one rank, and return the seconds of its steps, without those of the first.

    A step takes `step_s` seconds: over processes the rest of them is a pause, so the machines need
    no core each, and in virtual time all of them.
    """
    setup = Setup()
    data = dataset(setup.graph)
    torch.manual_seed(task.seed)
    model = SAGE(data.features.shape[1], setup.hidden, data.num_classes, num_layers=2, dropout=0.0)
    loader = Loader(
        data.graph,
        data.table,
        data.split["train"],
        setup.fanouts,
        batch_size=setup.batch_size,
        labels=data.labels,
        seed=task.seed,
        rank=group.rank,
        world_size=group.world_size,
        threads=1,
    )
    optimizer = METHODS[task.method](model, group, task.steps)
    yield from optimizer.broadcast_model_algorithm()
    batches = _repeat(loader)
    # the first computation loads kernels
    _loss(model, next(batches)).backward()
    optimizer.zero_grad()
    step_s = task.step_s * task.slow.get(group.rank, 1.0)
    yield AllGatherScalar(0)
    begin = yield Now()
    for _ in range(task.steps):
        began = yield Now()
        optimizer.zero_grad()
        _loss(model, next(batches)).backward()
        computed_s = (yield Now()) - began
        yield Compute(max(0.0, step_s - computed_s))
        yield from optimizer.algorithm()
    end = yield Now()
    yield from optimizer.finalize_algorithm()
    return float(end - begin)


def _repeat(loader: Loader) -> Iterator[Batch]:
    for _ in count():
        yield from loader


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch.blocks, batch.x), batch.y)


def measure(group: Group, line: Line) -> Iterator[Line]:
    """Run a task as a worker, and yield the seconds of all workers."""
    own = group.run(train(read_task(line), group))
    seconds = torch.tensor([own], dtype=torch.float64)
    gathered = group.run(yield_request(AllGather(seconds))).flatten().tolist()
    yield line | {"seconds": gathered, "sent_bytes": group.ledger.bytes_sent}


def read_task(line: Line) -> Task:
    """Return a task from its JSON, which has strings in place of the workers' numbers."""
    return Task(**line | {"slow": {int(rank): each for rank, each in line["slow"].items()}})


if __name__ == "__main__":
    if tasks.is_worker():
        tasks.serve(measure, timeout_s=TIMEOUT_S, one_group=False)
    else:
        main()
