"""Parameters of torch's `fully_shard` (FSDP2), of which each rank of a replica has a shard.

Local methods average the shards of a rank with the same shards of the other replicas: they treat a
rank's shards as its parameters, and its peers, one rank of each replica, as the group.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import AllGatherScalar, Group, run


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def is_shard_of_replica(parameter: Any) -> bool:
    """Return whether a parameter is sharded by `fully_shard` over the ranks of a replica."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.ndim == 1 and parameter.placements[0].is_shard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the same memory; other tensors as they are."""
    with torch.no_grad():
        found: Tensor = tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a DTensor of which this rank has a shard, laid out as a parameter.

    Tensors of another shape than the parameter's shard, such as counts of steps, are unchanged.
    """
    if not is_shard(parameter) or tensor.shape != local(parameter).shape:
        return tensor
    # imported here, it would double the time to import gcnzc.optim
    from torch.distributed.tensor import DTensor

    layout: Any = parameter
    found: Tensor = DTensor.from_local(
        tensor.to(parameter.device),
        layout.device_mesh,
        layout.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return found


def mesh_of(parameters: Iterable[Tensor]) -> Any:
    """Return the device mesh of the first DTensor, which is a replica; None if there is none."""
    return next((each.device_mesh for each in parameters if is_shard(each)), None)  # type: ignore[attr-defined]


def shard_name(parameters: Iterable[Tensor]) -> str:
    """Return which shards this rank has, for the keys of states; empty if nothing is sharded."""
    mesh = mesh_of(parameters)
    return "" if mesh is None else f", shard {mesh.get_local_rank()} of {mesh.size()}"


def find_peers(group: Group, parameters: Iterable[Tensor]) -> Group:
    """Return the ranks of a group that have the same shards as this one.

    All ranks of the group call it. It is the group itself if nothing is sharded.
    """
    mesh = mesh_of(parameters)
    if mesh is None:
        return group
    own = mesh.get_local_rank()
    numbers = run(_gather(own), group)
    return group.subgroup([rank for rank, number in enumerate(numbers) if number == own])


def _gather(number: int) -> Any:
    return (yield AllGatherScalar(number))


def holds_on_all_shards(flag: bool, parameters: Iterable[Tensor]) -> bool:
    """Return whether a flag is set on all ranks of this replica; they call it together."""
    mesh = mesh_of(parameters)
    if mesh is None:
        return flag
    value = torch.tensor(float(flag), device=mesh.device_type)
    torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MIN, group=mesh.get_group())
    return bool(value)
