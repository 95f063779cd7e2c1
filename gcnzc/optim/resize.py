"""Convert optimizer states of W ranks for another number of ranks.

The compression errors are preserved: the mean of the ranks' worker errors is added to the server
errors, which are sharded again for the new number of ranks. If the compression has no server
errors, the mean becomes the worker error of every new rank. Each value that is a rank's own is
converted by its rule, which is saved with it; see `gcnzc.optim.state`. If the replicas were out of
sync, as between two synchronizations, every new rank starts from their mean.
"""

import inspect
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcnzc.optim.fully_shard import shard_name
from gcnzc.system.arguments import describe

# keys of a state dict: the state that is the same on all ranks, and the state of one rank
COMMON = "of all ranks"
OWN = "of rank {rank} of {world_size}"
# key of the number of ranks that saved a state; only in a state of another number of ranks
RESIZED_FROM = "resized_from"
# keys of a snapshot that belong to the first of them
COMMON_KEYS = ("optimizer", "shared", "layout", "resize")


def pack_state(
    optimizer: str, snapshot: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Convert a snapshot into the layout of torch's state dicts.

    Args:
        optimizer: the name of the optimizer's type.
        snapshot: the optimizer's snapshot on this rank.
        groups: the optimizer's `param_groups`.

    Returns:
        `param_groups` with indices in place of parameters, and `state` of the trained parameters.
    """
    numbered: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    step = snapshot["shared"]["steps"]
    first = 0
    for group in groups:
        parameters = group["params"]
        for number, parameter in enumerate(parameters, first):
            if parameter.requires_grad:
                state[number] = {"step": step}
        numbers = list(range(first, first := first + len(parameters)))
        numbered.append({**group, "params": numbers})
    shard = shard_name(each for group in groups for each in group["params"])
    common = {name: value for name, value in snapshot.items() if name in COMMON_KEYS}
    excluded = (*COMMON_KEYS, "param_groups")
    own = {name: value for name, value in snapshot.items() if name not in excluded}
    own_key = OWN.format(rank=snapshot["rank"], world_size=snapshot["world_size"])
    holder = state.setdefault(min(state, default=0), {})
    holder[COMMON + shard] = _to_bytes({"optimizer": optimizer, **common})
    holder[own_key + shard] = _to_bytes(own)
    return {"state": state, "param_groups": numbered}


def check_state_dict_options() -> None:
    """Check the options of `get_optimizer_state_dict`, if it or `set_optimizer_state_dict` calls.

    torch fails with `full_state_dict` and `flatten_optimizer_state_dict`, because a state has
    bytes, and its errors do not name the options. It passes its options to no function of an
    optimizer, so they are looked up in the call stack.

    Raises:
        ValueError: one of these options is set.
    """
    # imported here, it would double the time to import gcnzc.optim
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    frame = None if module is None else inspect.currentframe()
    while frame is not None:
        if frame.f_globals is vars(module) and "info" in frame.f_locals:
            info = frame.f_locals["info"]
            # torch resets the option while it loads a full state
            is_loading = frame.f_code.co_name == "_load_optim_state_dict"
            found = {
                "full_state_dict": is_loading or getattr(info, "full_state_dict", False),
                "flatten_optimizer_state_dict": getattr(
                    info, "flatten_optimizer_state_dict", False
                ),
            }
            for name, is_set in found.items():
                if is_set:
                    raise ValueError(
                        f"{name}=True is not supported, because each rank has its own state\n\n"
                        "hint: omit the option, and save the state of each rank with "
                        "torch.distributed.checkpoint; gcnzc.optim.resize_state converts states "
                        "for another number of ranks"
                    )
        frame = frame.f_back


def check_mapping(state_dict: Mapping[str, Any], *keys: str) -> None:
    """Check that a state dict is a mapping with `keys`; raises ValueError."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"a state dict is a mapping, got {type(state_dict).__name__}\n\n"
            "hint: load the result of `state_dict`"
        )
    entries = state_dict.get("state", {})
    if not isinstance(entries, Mapping) or not all(
        isinstance(entry, Mapping) for entry in entries.values()
    ):
        raise ValueError(
            f"state of the state dict is {describe(entries)}, not a mapping of mappings\n\n"
            "hint: load the result of `state_dict`"
        )
    missing = [key for key in keys if key not in state_dict]
    if missing:
        raise ValueError(
            f"{_describe_state(state_dict)}, without {', '.join(missing)}\n\n"
            "hint: load the result of `state_dict`"
        )


def unpack_state(
    optimizer: str, state_dict: Mapping[str, Any], rank: int | None = None, shard: str = ""
) -> dict[str, Any]:
    """Extract the snapshot of a state dict; a copy of it if it is a snapshot.

    Args:
        optimizer: the name of the optimizer type to restore; any if empty.
        state_dict: a result of `pack_state`; parameters may have names in place of indices.
        rank: the rank whose state to extract; None if the state dict has only one.
        shard: see `shard_name`.

    Raises:
        ValueError: it is of another type of optimizer.
    """
    check_mapping(state_dict)
    if "rank" in state_dict and "shared" in state_dict:
        return dict(state_dict)
    entries = state_dict.get("state", {}).values()
    holder = next((entry for entry in entries if _common_key(entry)), None)
    if holder is None:
        raise ValueError(
            f"{_describe_state(state_dict)}, not the state of "
            f"{optimizer or 'an optimizer of gcnzc'}\n\n"
            "hint: load it into the type of optimizer that saved it; load the state of an inner "
            "optimizer with inner.load_state_dict before wrapping it"
        )
    own = {name: value for name, value in holder.items() if str(name).startswith("of rank ")}
    # of several shards only if torch.distributed.checkpoint has joined them
    common = COMMON + shard if COMMON + shard in holder else _common_key(holder)
    found = {name: value for name, value in own.items() if name.endswith(shard)}
    wanted = [name for name in found if name.startswith(f"of rank {rank} of ")]
    if not found:
        raise ValueError(
            "the state has the part that all ranks share, but not the state of any rank\n\n"
            "hint: load the complete result of `state_dict` on this rank"
        )
    snapshot = {**_from_bytes(holder[common]), **_from_bytes(found[next(iter([*wanted, *found]))])}
    return {**snapshot, "param_groups": state_dict.get("param_groups")}


def _count_ranks(state_dict: Mapping[str, Any]) -> int:
    """Return the number of ranks whose states a state dict has."""
    entries = [each for each in state_dict.get("state", {}).values() if _common_key(each)]
    return sum(name.startswith("of rank ") for entry in entries for name in entry)


def check_is_inner(state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict is that of an optimizer of torch.

    Raises:
        ValueError: it belongs to an optimizer that compresses or takes local steps.
    """
    if not _is_of_inner(state_dict):
        raise ValueError(
            "the state of an optimizer whose ranks have different states, not of the inner "
            "optimizer\n\nhint: load it into an optimizer with the same options, such as `compress`"
        )


def _common_key(entry: Mapping[str, Any]) -> str:
    """Return the key of the state that is the same on all ranks; empty if there is none."""
    return next((name for name in entry if str(name).startswith(COMMON)), "")


def _is_of_inner(state_dict: Mapping[str, Any]) -> bool:
    entries = state_dict.get("state", {}).values()
    return "rank" not in state_dict and not any(map(_common_key, entries))


def _describe_state(state_dict: Mapping[str, Any]) -> str:
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
    try:
        found: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for bytes that it did not write
        raise ValueError(
            f"the state is damaged: {error}\n\nhint: load another checkpoint"
        ) from error
    return found


def resize_state(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Convert the optimizer states of all ranks for a different number of ranks.

    Call it on each new rank, and load the result with `load_state_dict`. A single new rank does not
    exchange, so compression errors are dropped.

    Args:
        states: the `state_dict()` or `snapshot()` of all old ranks, in the order of ranks, from the
            same step; or a single one with the states of all ranks, as `dcp_to_torch_save` of torch
            writes. Those of `Averaged` without compression are equal on all ranks, and the first is
            returned.
        rank: the new rank.
        world_size: the new number of ranks. If it is the old one, the state of `rank` is returned
            unchanged.

    Returns:
        The argument of `load_state_dict` on the new rank; tensors may share memory with `states`.

    Raises:
        ValueError: states are missing, or from different steps.
    """
    if states and all(_is_of_inner(state) for state in states):
        return dict(states[0])
    if len(states) == 1:
        states = list(states) * max(1, _count_ranks(states[0]))
    states = [unpack_state("", state, number) for number, state in enumerate(states)]
    ranks = [state["rank"] for state in states]
    if (
        not states
        or ranks != list(range(len(states)))
        or any(state["world_size"] != len(states) for state in states)
    ):
        raise ValueError(
            f"states of ranks {ranks} of {[state['world_size'] for state in states]}\n\nhint: "
            "give the states of all ranks, in the order of ranks"
        )
    if len({repr(_plain_values(state["shared"])) for state in states}) > 1:
        raise ValueError("states of different steps\n\nhint: give the states of one checkpoint")
    if world_size == len(states):
        return dict(states[rank])
    first = dict(states[0])
    first |= {"rank": rank, "world_size": world_size}
    first.setdefault(RESIZED_FROM, len(states))
    # some ranks may have no value, such as those that do not take part in a round
    found = {
        name: [state["local"][name] for state in states if name in state["local"]]
        for name, rule in first["resize"].items()
        if rule != "drop"
    }
    first["local"] = {
        name: _convert(first["resize"][name], values, rank)
        for name, values in found.items()
        if values
    }
    first["shards"] = {
        name: _take_shard(torch.cat([state["shards"][name] for state in states]), rank, world_size)
        for name in first["shards"]
    }
    first["errors"] = {
        name: _fold_errors([state["errors"][name] for state in states], rank, world_size)
        for name in first["errors"]
    }
    return first


def _plain_values(shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a state that are no tensors, which are equal on all ranks."""
    return {name: value for name, value in shared.items() if not isinstance(value, Tensor)}


def _convert(rule: str, values: Sequence[Any], rank: int) -> Any:
    """Return a new rank's value by its rule: a tensor, a number, or an inner optimizer's state."""
    first = values[0]
    if rule == "mean" and isinstance(first, int | float) and not isinstance(first, bool):
        mean = sum(values) / len(values)
        return type(first)(round(mean) if isinstance(first, int) else mean)
    if rule == "mean":
        return _mean(values)
    if rule == "sum" and isinstance(first, Tensor):
        total = torch.stack([value.double() for value in values]).sum(dim=0)
        return (total * (rank == 0)).to(first.dtype)
    if rule == "sum":
        return type(first)(sum(values) if rank == 0 else 0)
    return first


def shard_bounds(num_elements: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return start and end of a rank's shard of a vector, the same as in `BlockLayout`."""
    each = -(-num_elements // world_size)
    each = -(-each // 32) * 32
    begin = min(rank * each, num_elements)
    return begin, min(begin + each, num_elements)


def _take_shard(vector: Tensor, rank: int, world_size: int) -> Tensor:
    begin, end = shard_bounds(len(vector), rank, world_size)
    return vector[begin:end].clone()


def _fold_errors(
    errors: Sequence[Mapping[str, Tensor]], rank: int, world_size: int
) -> dict[str, Any]:
    """Return the errors of a new rank, which preserve the sum of the ranks' mean errors.

    The mean of the worker errors is added to the server errors, if there are any; else it becomes
    the worker error of all new ranks.
    """
    if "server" not in errors[0]:
        return _average_worker_errors(errors, world_size)
    pending = torch.cat([each["server"] for each in errors]).double()
    for each in errors:
        pending += each["worker"].double() / len(errors)
    worker = errors[0]["worker"]
    # such as the number of means
    others = {name: error for name, error in errors[0].items() if name not in ("worker", "server")}
    if world_size == 1:
        # a single rank does not exchange, so it has no errors
        return others
    return others | {
        "worker": torch.zeros_like(worker),
        "server": _take_shard(pending, rank, world_size).to(worker.dtype),
    }


def _average_worker_errors(
    errors: Sequence[Mapping[str, Tensor]], world_size: int
) -> dict[str, Any]:
    """Return the errors of a new rank, with the mean of the worker errors if there are any."""
    others = {name: error for name, error in errors[0].items() if name != "worker"}
    # a single rank does not exchange, so it has no worker error
    if "worker" not in errors[0] or world_size == 1:
        return others
    return {**others, "worker": _mean([each["worker"] for each in errors])}


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean over nested structures of tensors; other values are those of the first."""
    first = values[0]
    if isinstance(first, Tensor):
        if not first.dtype.is_floating_point:
            return first
        return torch.stack([value.double() for value in values]).mean(dim=0).to(first.dtype)
    if isinstance(first, Mapping):
        # a rank has no inner state for a parameter that has not had a gradient there
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _mean([each[name] for each in values if name in each]) for name in names}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(each)) for each in zip(*values, strict=True))
    return first
