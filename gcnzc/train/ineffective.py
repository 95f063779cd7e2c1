"""Warnings of options that do not do in a run what they may be meant for."""

from collections.abc import Iterator
from typing import Any

from gcnzc.graph.dataset import Dataset
from gcnzc.train.build import warmup_steps
from gcnzc.train.config import ONE_BIT, TrainConfig
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.tracing import WARM_UP

# a run of fewer steps than this hardly trains a model, and a shorter warm-up estimates no variance
FEW_STEPS, SHORT_WARMUP_STEPS = 100, 10
# of an epoch, whose progress is then hardly seen
FEW_STEPS_OF_EPOCH = 3


def ineffective_options(
    config: TrainConfig, data: Dataset | HeteroDataset, num_seeds: int, workers: int, steps: int
) -> Iterator[str]:
    """Yield the warnings of a run.

    Args:
        config: options of the run.
        data: its graph.
        num_seeds: training nodes or edges.
        workers: number of workers.
        steps: steps of the whole run.
    """
    training, strategy, trace = config.training, config.run.strategy, config.run.trace
    epochs, batch, optimizer = training.epochs, config.loading.batch_size, training.optimizer.name
    task, accumulate = config.graph.task.name, training.accumulate
    if batch != "all" and steps < FEW_STEPS and steps <= FEW_STEPS_OF_EPOCH * epochs:
        of_epoch, option = steps // epochs, "--batch-size"
        if accumulate > 1 and num_seeds >= FEW_STEPS_OF_EPOCH * batch * workers:
            option = "--accumulate"
        yield (
            f"an epoch is {'a single step' if of_epoch == 1 else f'only {of_epoch} steps'} of "
            f"{batch * workers * accumulate:,} of the {num_seeds:,} training "
            f"{'edges' if task == 'link' else 'nodes'}; use a smaller {option}, or more --epochs"
        )
    warmup = warmup_steps(training, steps) if optimizer in ONE_BIT else None
    if warmup is not None and warmup < SHORT_WARMUP_STEPS:
        yield (
            f"{optimizer} has a warm-up of {warmup} of {steps} steps. The variance is estimated "
            "from the gradients of these steps, so training may diverge; use more --epochs, a "
            f"smaller --batch-size, a longer warm-up, as in {optimizer}:warmup=0.3, or another "
            "--optimizer"
        )
    of_several = {
        "strategy": strategy.name != "average" or bool(strategy.options),
        "optimizer": optimizer in ONE_BIT,
        "seed_order": config.loading.seed_order != "shuffled",
    }
    given = [
        f"--{name.replace('_', '-')} {config[name]}" for name in of_several if of_several[name]
    ]
    if given and workers == 1:
        yield (
            f"{', '.join(given)} with one worker, which exchanges nothing; give --workers N, or "
            "start several workers with torchrun"
        )
    if (shown := max(0, steps - WARM_UP)) < trace:
        yield (
            f"--trace {trace} {f'shows {shown} steps' if shown else 'shows nothing'}: the run has "
            f"{steps:,} steps, and the first {WARM_UP} are not recorded; use more --epochs"
        )
    if isinstance(data, HeteroDataset) and not config.graph.is_temporal:
        graph = data.graph
        stores: list[Any] = [graph.nodes(data.target)] if data.target else []
        edges = graph.edge_types if task == "link" else []
        if any(each.time is not None for each in [*stores, *map(graph.edges, edges)]):
            yield (
                "the graph has times, and neighbours may be later than what is predicted, which "
                "raises scores if they depend on it; --temporal uniform samples earlier ones only"
            )
