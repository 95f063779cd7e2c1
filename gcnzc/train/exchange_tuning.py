"""Choose the fastest collective algorithms for a run, by new or stored measurements."""

import torch

from gcnzc.exchange import Group, Tuning, run, tune
from gcnzc.exchange.layout import describe_layout, group_by_dtype
from gcnzc.exchange.sync import check_same
from gcnzc.system.files import cache_folder

# time limit of the measurements, in seconds
TUNING_S = 5.0


# sizes that are gathered for every checkpoint: statistics, and torch's random state
GATHERED_BYTES = (64, 5056)


def exchange_tuning(model: torch.nn.Module, group: Group) -> Tuning:
    """Find the fastest collective algorithms for the message sizes of a run.

    Sizes without a stored measurement are measured; results are stored in the cache folder of
    worker 0.

    Args:
        model: the model of the run, with the same parameters on all workers; values may differ.
        group: all workers; its choices are not changed.

    Raises:
        ValueError: the workers' models differ.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    # with different sizes, the collectives below would not end
    run(check_same(describe_layout(named), "models"), group)
    whole = [
        sum(tensor.numel() * tensor.element_size() for _, tensor in kind)
        for kind in group_by_dtype(named)
    ]
    sizes = {"Sum": whole, "Broadcast": whole, "AllGather": GATHERED_BYTES, "AllToAll": whole}
    return tune(group, cache_folder(), sizes, budget_s=TUNING_S)
