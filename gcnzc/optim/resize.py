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
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcnzc.optim.fully_shard import shard_name
from gcnzc.system.arguments import describe

# keys of a state dict: the state that is the same on all ranks, and the state of one rank
COMMON = "of all ranks"
OWN = "of rank {rank} of {world_size}"
# keys of a snapshot that belong to the first of them, and to neither
COMMON_KEYS = ("optimizer", "shared", "layout", "resize")
GROUPS = "param_groups"
# length of the CRC-32 after the bytes of a state
CHECKSUM_BYTES = 4


def number_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups with the numbers of parameters in place of them, as torch saves."""
    numbered, first = [], 0
    for group in groups:
        numbers = list(range(first, first := first + len(group["params"])))
        numbered.append({**group, "params": numbers})
    return numbered


def pack_state(snapshot: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Convert a snapshot into the layout of torch's state dicts.

    Args:
        snapshot: the optimizer's snapshot on this rank.
        parameters: of all groups.

    Returns:
        `param_groups` with indices in place of parameters, and `state` of the trained parameters.
    """
    step, shard = snapshot["shared"]["steps"], shard_name(parameters)
    state: dict[int, dict[str, Any]] = {
        number: {"step": step} for number, each in enumerate(parameters) if each.requires_grad
    }
    holder = state.setdefault(min(state, default=0), {})
    excluded = (*COMMON_KEYS, GROUPS)
    own = {name: value for name, value in snapshot.items() if name not in excluded}
    holder[COMMON + shard] = _to_bytes({name: snapshot[name] for name in COMMON_KEYS})
    holder[OWN.format_map(own) + shard] = _to_bytes(own)
    return {"state": state, GROUPS: snapshot[GROUPS]}


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
            found = {
                name: getattr(frame.f_locals["info"], name, False)
                for name in ("full_state_dict", "flatten_optimizer_state_dict")
            }
            # torch resets the option while it loads a full state
            found["full_state_dict"] |= frame.f_code.co_name == "_load_optim_state_dict"
            if name := next(filter(found.get, found), ""):
                raise ValueError(
                    f"{name}=True is not supported, because each rank has its own state\n\n"
                    "hint: omit the option, and save the state of each rank with "
                    "torch.distributed.checkpoint; gcnzc.optim.resize_state converts states for "
                    "another number of ranks"
                )
        frame = frame.f_back


def check_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Check that a state dict has the entries of those of torch's optimizers.

    Raises:
        ValueError: it has not.
    """
    if not isinstance(state_dict, Mapping) or GROUPS not in state_dict:
        raise ValueError(
            f"{describe(state_dict)} is not a state dict of an optimizer\n\nhint: load the result "
            "of `state_dict`"
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
    if isinstance(state_dict, Mapping) and "rank" in state_dict and "shared" in state_dict:
        return dict(state_dict)
    check_state_dict(state_dict)
    holder = find_holder(state_dict)
    if not holder:
        names = {str(name) for each in state_dict.get("state", {}).values() for name in each}
        raise ValueError(
            f"the state of an optimizer of torch, with {', '.join(sorted(names)) or 'nothing'}, "
            f"not the state of {optimizer or 'an optimizer of gcnzc'}\n\nhint: load it into the "
            "type of optimizer that saved it; load the state of an inner optimizer with "
            "inner.load_state_dict before wrapping it"
        )
    # of several shards only if torch.distributed.checkpoint has joined them
    common = next(each for each in (COMMON + shard, *holder) if each in holder and COMMON in each)
    found = [each for each in holder if each.startswith("of rank ") and each.endswith(shard)]
    wanted = [each for each in found if each.startswith(f"of rank {rank} of ")]
    if not found:
        raise ValueError(
            "the state has the part that all ranks share, but not the state of any rank\n\n"
            "hint: load the complete result of `state_dict` on this rank"
        )
    own = _from_bytes(holder[[*wanted, *found][0]])
    return {**_from_bytes(holder[common]), **own, GROUPS: state_dict.get(GROUPS)}


def find_holder(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry of a state dict that has the snapshot; empty if there is none."""
    entries = state_dict.get("state", {}).values()
    has_snapshot = (each for each in entries if any(str(name).startswith(COMMON) for name in each))
    return next(has_snapshot, {})


def _to_bytes(values: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(values), file)
    data = file.getvalue()
    return data + zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "big")


def _from_bytes(data: bytes) -> dict[str, Any]:
    content, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "big") != checksum:
        raise ValueError(
            "the state is damaged: its checksum is wrong\n\nhint: load another checkpoint"
        )
    found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
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
    if states and not any("rank" in each or find_holder(each) for each in states):
        return dict(states[0])
    if len(states) == 1:
        num_ranks = sum(name.startswith("of rank ") for name in find_holder(states[0]))
        states = list(states) * max(1, num_ranks)
    states = [unpack_state("", state, number) for number, state in enumerate(states)]
    ranks = [(state["rank"], state["world_size"]) for state in states]
    if not ranks or ranks != [(number, len(states)) for number in range(len(states))]:
        raise ValueError(
            f"states of {', '.join('rank {} of {}'.format(*each) for each in ranks) or 'no rank'}"
            "\n\nhint: give the states of all ranks, in the order of ranks"
        )
    first = states[0]
    if any(_plain_values(state) != _plain_values(first) for state in states):
        raise ValueError("states of different steps\n\nhint: give the states of one checkpoint")
    if world_size == len(states):
        return dict(states[rank])

    def of_all(section: str, name: str) -> list[Any]:
        # some ranks may have no value, such as those that do not take part in a round
        return [state[section][name] for state in states if name in state[section]]

    return {
        **first,
        "rank": rank,
        "world_size": world_size,
        "local": {
            name: _convert(rule, values)
            for name, rule in first["resize"].items()
            if rule != "drop" and (values := of_all("local", name))
        },
        "shards": {
            name: _take_shard(torch.cat(of_all("shards", name)), rank, world_size)
            for name in first["shards"]
        },
        "errors": {
            name: _fold_errors(of_all("errors", name), rank, world_size) for name in first["errors"]
        },
    }


def _plain_values(state: Mapping[str, Any]) -> str:
    """Return the shared values that are no tensors, which are equal on all ranks, as text."""
    shared = state["shared"].items()
    return repr({name: value for name, value in shared if not isinstance(value, Tensor)})


def _convert(rule: str, values: Sequence[Any]) -> Any:
    """Return a new rank's value by its rule: a tensor, a number, or an inner optimizer's state."""
    first = values[0]
    if rule == "same" or isinstance(first, bool):
        return first
    if isinstance(first, int | float):
        mean = sum(values) / len(values)
        return round(mean) if isinstance(first, int) else mean
    return _mean(values)


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
    first = errors[0]
    # such as the number of means
    others = {name: error for name, error in first.items() if name not in ("worker", "server")}
    # a single rank does not exchange, so it has no errors
    if "worker" not in first or world_size == 1:
        return others
    if "server" not in first:
        return {**others, "worker": _mean([each["worker"] for each in errors])}
    pending = torch.cat([each["server"] for each in errors]).double()
    for each in errors:
        pending += each["worker"].double() / len(errors)
    server = _take_shard(pending, rank, world_size).to(first["worker"].dtype)
    return {**others, "worker": torch.zeros_like(first["worker"]), "server": server}


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean over nested structures of tensors; other values are those of the first."""
    first = values[0]
    if isinstance(first, Tensor) and first.dtype.is_floating_point:
        return torch.stack([value.double() for value in values]).mean(dim=0).to(first.dtype)
    if isinstance(first, Mapping):
        # a rank has no inner state for a parameter that has not had a gradient there
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _mean([each[name] for each in values if name in each]) for name in names}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(each)) for each in zip(*values, strict=True))
    return first
