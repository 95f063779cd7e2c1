"""Presampling: count how often rows are read, without gathering features."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, count, islice
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gcnzc.features.access_counts import Presample
from gcnzc.graph.graph import Graph
from gcnzc.kernels.gather.cached import add_counts
from gcnzc.loader.checks import default_threads
from gcnzc.loader.seeds import epoch_order
from gcnzc.sampling.neighbor import Sampler, check_graph, check_seeds
from gcnzc.system.arguments import THREADS_LIMIT, IdsLike, check_callable, check_integer, check_seed

BATCHES = 100  # sampled before training; bench/loading/feature_cache.py measures other numbers


# XORed with a run's seed, so that the sampled minibatches differ from those of the run
SEED_MIX = 0x5DEECE66D1B54A33


# each degree up to EXACT_DEGREES has its own bin; above, there are eight bins per doubling
EXACT_DEGREES, BINS_PER_DOUBLING = 64, 8


Progress: TypeAlias = Callable[[int, int], object]  # called with (done, total)


def presample(
    graph: Graph,
    seeds: IdsLike,
    fanouts: Sequence[int],
    batch_size: int = 1024,
    *,
    seed: int = 0,
    batches: int = BATCHES,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Presample:
    """Sample minibatches like those of a run, and count how many of them contain each node.

    The counts rank the rows for `gcnzc.cached`. They depend on `seed`, but not on the number of
    threads. The minibatches differ from those of the run: each one samples its neighbours
    independently, while the minibatches of one epoch of a run share the neighbours of a node.

    Args:
        graph: on the host.
        seeds: (S,) ids of the run's training nodes: a tensor, an array or a list.
        fanouts: of the run; see `gcnzc.Sampler`.
        batch_size: number of seeds in a minibatch.
        seed: random seed of the run.
        batches: number of sampled minibatches, which form two equal halves: even, at least 4.
        threads: number of threads. Default: one per core, at most four.
        progress: called with (done, total), in minibatches.

    Raises:
        TypeError: an argument has another type.
        ValueError: `batches` is odd or too small, there are no seeds, or `gcnzc.Sampler` rejects
            an argument.
    """
    check_graph(graph)
    graph.check_untyped()
    batches = check_integer("batches", batches, 4, hint="4 at least; the default is 100")
    if batches % 2:
        raise ValueError(
            f"batches is {batches}, which is odd, but the minibatches form two equal halves"
        )
    batch_size = check_integer("batch_size", batch_size, 1)
    if threads is not None:
        threads = check_integer("threads", threads, 1, THREADS_LIMIT, "None for the default")
    check_callable("progress", progress)
    seeds = check_seeds("seeds", seeds, graph.num_nodes)
    if len(seeds) == 0:
        raise ValueError("seeds is empty: nothing to sample\n\nhint: is the training split empty?")
    key = (check_seed("seed", seed) ^ SEED_MIX) % 2**64
    sampler, batches_per_half = Sampler(graph, fanouts, key), batches // 2
    halves = tuple(torch.zeros(graph.num_nodes, dtype=torch.int32) for _ in range(2))
    # the halves use different orders of the seeds, and each order uses every seed once
    seed_batches = [
        islice(_batches_of(seeds, batch_size, key, first_order), batches_per_half)
        for first_order in (0, 2**31)
    ]
    for number, nodes in enumerate(_sample_nodes(sampler, chain(*seed_batches), threads)):
        add_counts(halves[number // batches_per_half], nodes)
        if progress is not None:
            progress(number + 1, batches)
    return Presample((halves[0], halves[1]), batches_per_half, _bin_nodes(graph, seeds))


def _batches_of(seeds: Tensor, batch_size: int, key: int, first_order: int) -> Iterator[Tensor]:
    """Yield the seeds of minibatches without end, in a new order each epoch."""
    for number in count(first_order):
        yield from epoch_order(seeds, key, number).split(batch_size)


def _sample_nodes(
    sampler: Sampler, seed_batches: Iterator[Tensor], threads: int | None
) -> Iterator[Tensor]:
    """Yield the nodes of the minibatches of given seeds in order, prefetched by threads."""
    if threads is None:
        threads = default_threads()
    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(threads, "gcnzc-presample") as executor:
        for number, seeds in enumerate(seed_batches):
            # each has its own epoch: within one epoch, a node's sampled neighbours are the same
            pending.append(
                executor.submit(lambda *what: sampler.sample(*what).nodes, seeds, number)
            )
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _bin_nodes(graph: Graph, seeds: Tensor) -> Tensor:
    """Return a bin for each node, by its in-degree and by whether it is a seed, (N,) int16."""
    degrees = graph.in_degrees().numpy()
    bins = degrees.clip(max=EXACT_DEGREES).astype(np.int16)
    is_above = degrees > EXACT_DEGREES
    doublings = np.log2(degrees[is_above] / EXACT_DEGREES)
    bins[is_above] = EXACT_DEGREES + (BINS_PER_DOUBLING * doublings).astype(np.int16)
    bins *= 2
    bins[seeds.numpy()] += 1
    return torch.from_numpy(bins)
