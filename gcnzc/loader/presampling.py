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
from gcnzc.kernels.gather.cached import count_into
from gcnzc.loader.loader import Loader
from gcnzc.loader.seeds import epoch_order
from gcnzc.loader.threads import default_threads
from gcnzc.sampling.neighbor import Sampler, check_graph, check_seeds
from gcnzc.system.arguments import THREADS_LIMIT, IdsLike, check_callable, check_integer, check_seed

BATCHES = 100  # that are counted before training; bench/hot.py says what more would bring


# mixed into a run's seed, so that no minibatch counted here is one of the run
OTHER = 0x5DEECE66D1B54A33


# degrees below this have a class of their own; above, eight classes for each doubling
OWN_CLASS, CLASSES_PER_DOUBLING = 64, 8


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
    """Draw minibatches as a run would, and count in how many of them each node is.

    The result depends on `seed` alone, and not on the threads. No minibatch is one of the run's,
    and each draws its neighbours anew, while those of one epoch of a run share what is drawn for a
    node.

    Args:
        graph: on the host.
        seeds: (S,) ids of the run's training nodes: a tensor, an array or a list.
        fanouts: of the run, as `gcnzc.Sampler` takes them.
        batch_size: seeds of a minibatch.
        seed: of the run.
        batches: how many are drawn, in two halves; at least 4.
        threads: that sample; one per core, but four at most, if None.
        progress: called with (done, total), in minibatches.

    Raises:
        TypeError: an argument of another type.
        ValueError: too few batches, no seeds, or what `gcnzc.Sampler` refuses.
    """
    check_graph(graph)
    batches = check_integer("batches", batches, 4, hint="4 at least; the default is 100")
    batch_size = check_integer("batch_size", batch_size, 1)
    if threads is not None:
        threads = check_integer("threads", threads, 1, THREADS_LIMIT, "None takes the default")
    check_callable("progress", progress)
    seeds = check_seeds("seeds", seeds, graph.num_nodes)
    if len(seeds) == 0:
        raise ValueError("seeds is empty: nothing to draw\n\nhint: is the training split empty?")
    key = (check_seed("seed", seed) ^ OTHER) % 2**64
    sampler, each = Sampler(graph, fanouts, key), batches // 2
    halves = tuple(torch.zeros(graph.num_nodes, dtype=torch.int32) for _ in range(2))
    # orders of the seeds that the halves do not share: a seed is used once in each
    picked = [
        islice(_batches_of(seeds, batch_size, key, first_order), each) for first_order in (0, 2**31)
    ]
    for number, nodes in enumerate(_drawn(sampler, chain(*picked), threads)):
        count_into(halves[number // each], nodes)
        if progress is not None:
            progress(number + 1, 2 * each)
    kinds = _kinds(graph, seeds)
    return Presample((halves[0], halves[1]), each, kinds)


def count_accesses(loader: Loader, batches: int, progress: Progress | None = None) -> Tensor:
    """In how many of the next minibatches of a loader each node is.

    Args:
        loader: begins with its present epoch.
        batches: how many to look at, over as many epochs as they take.
        progress: called with (done, total), in minibatches.

    Returns:
        (N,) int32 on the host.
    """
    counts = torch.zeros(loader.graph.num_nodes, dtype=torch.int32)
    made = chain.from_iterable(iter(loader) for _ in count())
    for number, batch in enumerate(islice(made, batches)):
        count_into(counts, batch.nodes)
        if progress is not None:
            progress(number + 1, batches)
    return counts


def _batches_of(seeds: Tensor, batch_size: int, key: int, first_order: int) -> Iterator[Tensor]:
    """The seeds of minibatches without end: all of them in one order, then in another."""
    for number in count(first_order):
        yield from epoch_order(seeds, key, number).split(batch_size)


def _drawn(sampler: Sampler, picked: Iterator[Tensor], threads: int | None) -> Iterator[Tensor]:
    """The nodes of the minibatches of these seeds, in turn, drawn by threads that work ahead."""
    if threads is None:
        threads = default_threads()
    coming: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(threads, "gcnzc-presample") as executor:
        for number, seeds in enumerate(picked):
            # an epoch of its own for each: within one, a node's neighbours are drawn once
            coming.append(executor.submit(lambda *what: sampler.sample(*what).nodes, seeds, number))
            if len(coming) > threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _kinds(graph: Graph, seeds: Tensor) -> Tensor:
    """(N,) int16: nodes of about the same degree, seeds apart from others."""
    degrees = graph.in_degrees().numpy()
    kinds = degrees.clip(max=OWN_CLASS).astype(np.int16)
    wide = degrees > OWN_CLASS
    doublings = np.log2(degrees[wide] / OWN_CLASS)
    kinds[wide] = OWN_CLASS + (CLASSES_PER_DOUBLING * doublings).astype(np.int16)
    kinds *= 2
    kinds[seeds.numpy()] += 1
    return torch.from_numpy(kinds)
