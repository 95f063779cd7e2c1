"""The parts of the graph whose seeds the workers train on with --seed-order local."""

import zlib

from torch import Tensor

from gcnzc.exchange import Group, run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.partition import cut_fraction, partition_graph
from gcnzc.sampling.link import LinkSampler
from gcnzc.train.config import TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.shared_data import share_result
from gcnzc.train.tasks.base import Task


def find_parts(
    config: TrainConfig,
    data: Dataset | HeteroDataset,
    task: Task,
    num_parts: int,
    group: Group,
) -> tuple[Tensor | None, float]:
    """Partition the graph of a run into parts with equal numbers of seeds.

    The first worker of each machine partitions the graph, and shares the result with the others. A
    seed edge belongs to the part of its source.

    Args:
        config: options of the run.
        data: the graph, the same on all workers.
        task: training task, which has the seeds.
        num_parts: number of parts: the number of workers with which the current epoch began.
        group: all workers.

    Returns:
        The argument `parts` of the loader, and the fraction of edges between parts; (None, 0.0) if
        --seed-order is not local.

    Raises:
        RuntimeError: the workers have different partitions; or as `share_result` does.
        WorkerLost: another worker has ended or does not respond.
    """
    if config.loading.seed_order != "local":
        return None, 0.0
    assert isinstance(data, Dataset), "TrainConfig has checked"
    graph = data.graph
    sources = task.sampler.edges[0] if isinstance(task.sampler, LinkSampler) else None
    seeds = task.seeds if sources is None else sources

    def partition() -> tuple[Tensor, float]:
        parts = partition_graph(graph, num_parts, seeds, seed=config.loading.seed)
        return parts, cut_fraction(graph, parts)

    if group.world_size == 1:
        parts, cut = partition()
    else:
        parts, cut = share_result(lambda _: partition(), group)
        if len(set(run(all_gather_scalar(zlib.crc32(parts.numpy().data)), group))) > 1:
            raise RuntimeError(
                "--seed-order local: the workers have different partitions of the graph\n\n"
                "hint: give all machines the same graph and the same version of gcnzc"
            )
    return (parts if sources is None else parts[sources.long()]), cut
