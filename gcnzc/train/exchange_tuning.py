"""Collective algorithms chosen for a run, by measurement or from an earlier one."""

import torch

from gcnzc.exchange import Group, Tuning, run, tune
from gcnzc.exchange.layout import describe_layout, group_by_dtype
from gcnzc.exchange.sync import check_same
from gcnzc.system.files import cache_folder

# what the first run between some workers spends on measuring collectives
TUNING_S = 5.0


# gathered with every checkpoint: torch's random state, and counts
GATHERED_BYTES = (64, 5056)


def exchange_tuning(model: torch.nn.Module, group: Group) -> Tuning:
    """Which collectives are fastest between these workers, at the sizes that a run of `model` asks.

    What is missing of it is measured, and kept in the cache folder of worker 0.

    Args:
        model: the same on all workers, of whatever values.
        group: of all workers; its choices stay as they are.

    Raises:
        ValueError: the workers' models differ.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    # with other sizes workers would wait for each other for ever
    run(check_same(describe_layout(named), "models"), group)
    whole = [
        sum(tensor.numel() * tensor.element_size() for _, tensor in kind)
        for kind in group_by_dtype(named)
    ]
    sizes = {"Sum": whole, "Broadcast": whole, "AllGather": GATHERED_BYTES, "AllToAll": whole}
    return tune(group, cache_folder(), sizes, budget_s=TUNING_S)
