"""The states of W workers' optimizers, made to fit another number of workers.

What compression has left out so far is kept whatever the number of workers: the mean of the
workers' errors is added to the servers', whose parts are cut anew. Where workers were apart, as
between two synchronisations, each new one begins at their mean.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def resized(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """What a worker of another number of workers goes on from.

    Args:
        states: `state_dict()` of all old workers, in the order of ranks, at the same step.
        rank: of the new worker.
        world_size: how many new ones there are; if as many as before, its own state is given.

    Returns:
        What `load_state_dict` takes; tensors may be those of `states`.

    Raises:
        ValueError: states are missing, or of different steps.
    """
    ranks = [state["rank"] for state in states]
    if ranks != list(range(len(states))) or any(
        state["world_size"] != len(states) for state in states
    ):
        raise ValueError(
            f"states of workers {ranks} of {[state['world_size'] for state in states]}\n\nhint: "
            "give those of all workers, in the order of ranks"
        )
    if len({repr(state["shared"].get("numbers")) for state in states}) > 1:
        raise ValueError("states of different steps\n\nhint: give those of one checkpoint")
    if world_size == len(states):
        return dict(states[rank])
    first = dict(states[0])
    first |= {"rank": rank, "world_size": world_size}
    first["local"] = _mean([state["local"] for state in states])
    if "inner" in first:
        first["inner"] = _mean([state["inner"] for state in states])
    first["shards"] = {
        name: _part(torch.cat([state["shards"][name] for state in states]), rank, world_size)
        for name in first["shards"]
    }
    first["errors"] = {
        name: _folded([state["errors"][name] for state in states], rank, world_size)
        for name in first["errors"]
    }
    return first


def part_of(num_elements: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where a worker's part of a vector begins and ends: parts as `gcnzc.kernels.cut` cuts them."""
    each = -(-num_elements // world_size)
    each = -(-each // 32) * 32
    begin = min(rank * each, num_elements)
    return begin, min(begin + each, num_elements)


def _part(vector: Tensor, rank: int, world_size: int) -> Tensor:
    begin, end = part_of(len(vector), rank, world_size)
    return vector[begin:end].clone()


def _folded(errors: Sequence[Mapping[str, Tensor]], rank: int, world_size: int) -> dict[str, Any]:
    """All that was left out, as the errors of servers."""
    if "server" not in errors[0]:
        return dict(errors[0])
    pending = torch.cat([each["server"] for each in errors]).double()
    for each in errors:
        pending += each["worker"].double() / len(errors)
    worker = errors[0]["worker"]
    # such as how many means were taken
    alike = {name: error for name, error in errors[0].items() if name not in ("worker", "server")}
    if world_size == 1:
        # one worker has no errors: there is nobody to whom to send
        return alike
    return alike | {
        "worker": torch.zeros_like(worker),
        "server": _part(pending, rank, world_size).to(worker.dtype),
    }


def _mean(values: Sequence[Any]) -> Any:
    """The mean of the tensors of several structures that are alike; the rest is the first one's."""
    first = values[0]
    if isinstance(first, Tensor):
        if not first.dtype.is_floating_point:
            return first
        return torch.stack([value.double() for value in values]).mean(dim=0).to(first.dtype)
    if isinstance(first, Mapping):
        # a worker has no inner state for a parameter of which it had no gradient yet
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _mean([each[name] for each in values if name in each]) for name in names}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(each)) for each in zip(*values, strict=True))
    return first
