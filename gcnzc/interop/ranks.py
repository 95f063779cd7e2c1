"""The rank and the world size of a drop-in loader, given or taken from torch.distributed."""

from collections.abc import Mapping
from typing import Any, cast

from torch.utils.data.distributed import DistributedSampler

from gcnzc.interop.options import Options
from gcnzc.loader.seeds import Shares

has_warned_about_ranks = False


def rank_and_world_size() -> tuple[int, int]:
    """Return rank and world size of torch's default process group.

    Raises:
        RuntimeError, ValueError: there is none.
    """
    # only gcnzc.exchange.group communicates through torch.distributed
    group: DistributedSampler[Any] = DistributedSampler(cast(Any, range(1)))
    return group.rank, group.num_replicas


def shares_of(options: Options, num_items: int) -> Shares:
    """Return the fraction of the items that a rank takes."""
    rank, world_size = options.rank, options.world_size
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank {rank} and world_size {world_size}\n\nhint: pass both, or neither")
    if options.has_user_sampler:
        if (world_size or 1) > 1 and not _is_distributed(options.dataloader_options):
            raise ValueError(
                f"rank {rank} and world_size {world_size} share the items among the ranks, but "
                "a sampler was given as well\n\n"
                "hint: pass a torch.utils.data.DistributedSampler, or no sampler"
            )
        rank = world_size = None
    rank, world_size = rank or 0, 1 if world_size is None else world_size
    return Shares(
        num_items,
        options.batch_size,
        rank,
        world_size,
        options.drop_last,
        may_be_empty=True,
    )


def _is_distributed(dataloader_options: Mapping[str, Any]) -> bool:
    """Whether the sampler shares the items among ranks itself."""
    sampler = dataloader_options.get("sampler") or dataloader_options["batch_sampler"]
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return isinstance(sampler, DistributedSampler)
