"""Convert optimizer states of W ranks for another number of ranks.

What compression has left out so far is kept whatever the number of workers: the mean of the
workers' errors is added to the servers', whose parts are cut anew. Where workers were apart, as
between two synchronisations, each new one begins at their mean.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

COMMON = "of all ranks"


"""name of the entry of a packed state that is the same on all ranks"""


OWN = "of rank {rank} of {world_size}"


COMMON_KEYS = ("optimizer", "shared", "layout")


def packed(
    optimizer: str, snapshot: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Convert a snapshot into the layout of torch's state dicts.

    Args:
        optimizer: the name of the optimizer's type.
        snapshot: of the optimizer on this rank.
        groups: its param_groups.

    Returns:
        `param_groups` with numbers in place of parameters, and `state` of the trained parameters.
    """
    numbered: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    step = snapshot["shared"].get("numbers", {}).get("steps", 0)
    first = 0
    for group in groups:
        parameters = group["params"]
        for number, parameter in enumerate(parameters, first):
            if parameter.requires_grad:
                state[number] = {"step": step}
        numbers = list(range(first, first := first + len(parameters)))
        numbered.append({**group, "params": numbers})
    common = {name: value for name, value in snapshot.items() if name in COMMON_KEYS}
    own = {name: value for name, value in snapshot.items() if name not in COMMON_KEYS}
    place = OWN.format(rank=snapshot["rank"], world_size=snapshot["world_size"])
    holder = state.setdefault(min(state, default=0), {})
    holder[COMMON] = _to_bytes({"optimizer": optimizer, **common})
    holder[place] = _to_bytes(own)
    return {"state": state, "param_groups": numbered}


def unpacked(
    optimizer: str, state_dict: Mapping[str, Any], rank: int | None = None
) -> dict[str, Any]:
    """Extract the snapshot of a state dict; a snapshot, as older versions saved, is returned.

    Args:
        optimizer: the name of the optimizer type to restore; any if empty.
        state_dict: a result of `packed`; parameters may have names in place of numbers.
        rank: whose own state to extract; None if there is only one.

    Raises:
        ValueError: it is of another type of optimizer.
    """
    if "rank" in state_dict and "shared" in state_dict:
        return dict(state_dict)
    entries = state_dict.get("state", {}).values()
    holder = next((entry for entry in entries if COMMON in entry), None)
    if holder is None:
        raise ValueError(
            f"{_described(state_dict)}, not the state of {optimizer or 'an optimizer of gcnzc'}\n\n"
            "hint: load it into the optimizer that it is of; that of an inner optimizer is loaded "
            "with inner.load_state_dict before it is wrapped"
        )
    found = {name: value for name, value in holder.items() if name not in (COMMON, "step")}
    wanted = [name for name in found if name.startswith(f"of rank {rank} of ")]
    if not found:
        raise ValueError(
            "the state has what all ranks have in common, but no rank's own state\n\n"
            "hint: load the state dict that `state_dict` returned on this rank, whole"
        )
    snapshot = {**_from_bytes(holder[COMMON]), **_from_bytes(found[next(iter([*wanted, *found]))])}
    kind = snapshot.pop("optimizer")
    if optimizer and kind != optimizer:
        raise ValueError(
            f"the state of {kind}, not of {optimizer}\n\nhint: load it into the optimizer that it "
            "is of"
        )
    # options may have been changed in the `param_groups` of the state dict
    groups = snapshot.get("inner", snapshot)
    for group, other in zip(groups["param_groups"], state_dict["param_groups"], strict=True):
        group.update({name: value for name, value in other.items() if name != "params"})
    return snapshot


def check_is_inner(state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict is that of an optimizer of torch.

    Raises:
        ValueError: it belongs to an optimizer that compresses or takes local steps.
    """
    entries = state_dict.get("state", {}).values()
    if "rank" in state_dict or any(COMMON in entry for entry in entries):
        raise ValueError(
            "the state of an optimizer with a state of its own on each rank, not of the inner "
            "optimizer\n\nhint: load it into an optimizer with the same options, such as `compress`"
        )


def _described(state_dict: Mapping[str, Any]) -> str:
    entries: Iterable[Any] = state_dict.get("state", {}).values()
    names = sorted({name for entry in entries if isinstance(entry, Mapping) for name in entry})
    if names:
        return f"the state of an optimizer of torch, with {', '.join(map(str, names))}"
    return f"a state with {', '.join(map(str, state_dict)) or 'nothing'}"


def _to_bytes(values: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(values), file)
    return file.getvalue()


def _from_bytes(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return found


def resize_state(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """What a worker of another number of workers goes on from.

    Args:
        states: `state_dict()` or `snapshot()` of all old workers, in the order of ranks, at the
            same step.
        rank: of the new worker.
        world_size: how many new ones there are; if as many as before, its own state is given.

    Returns:
        What `load_state_dict` takes; tensors may be those of `states`.

    Raises:
        ValueError: states are missing, or of different steps.
    """
    states = [unpacked("", state) for state in states]
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
    """Return begin and end of a rank's part of a vector, as `BlockLayout` has them."""
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
