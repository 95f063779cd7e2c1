"""The state of a loader, checked before it is loaded."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gcnzc.system.arguments import check_epoch, check_integer, check_kind, describe

# numbers that decide how items are divided into batches and among ranks; a resumed loader may have
# others, and then yields other batches of the remaining items
PARTITION = ("batch_size", "world_size")


def check_state(
    state: Mapping[str, Any], same: Mapping[str, Any], num_items: int
) -> dict[str, int]:
    """Check the state that a loader is to resume.

    Args:
        state: of a loader.
        same: settings of the loader that resumes it, which must be equal in the state.
        num_items: number of items of the loader that resumes it, which are seeds of `gcnzc.Loader`.

    Returns:
        epoch, position, done, batch_size and world_size, as integers in their ranges; `position`
        may still be beyond the epoch's end, see `check_position`.

    Raises:
        TypeError: the state is not a mapping, or one of the numbers not an integer.
        ValueError: a value is missing, out of range, or not equal.
    """
    hint = "load what state_dict() of a loader gave"
    check_kind("state", state, Mapping, hint)
    needed = {"epoch", "position", "done", *PARTITION, *same}
    if missing := needed - state.keys():
        raise ValueError(f"the state lacks {', '.join(sorted(missing))}\n\nhint: {hint}")
    for name, own in same.items():
        if not _is_equal(state[name], own):
            raise ValueError(
                f"the state is of a loader with {name} {describe(state[name])}, not "
                f"{describe(own)}\n\nhint: resume with the options of the run that was saved"
            )
    return {
        "epoch": check_epoch("state['epoch']", state["epoch"]),
        "position": check_integer("state['position']", state["position"], 0, hint=hint),
        "done": check_integer("state['done']", state["done"], 0, num_items, hint),
        "batch_size": check_integer("state['batch_size']", state["batch_size"], 1, hint=hint),
        "world_size": check_integer("state['world_size']", state["world_size"], 1, hint=hint),
    }


def check_position(position: int, num_steps: int | None) -> None:
    """Check that a state's position is within its epoch of `num_steps`; None skips the check.

    Raises:
        ValueError: the position is beyond the end of the epoch.
    """
    if num_steps is not None and position > num_steps:
        raise ValueError(f"state['position'] is {position}, but the epoch has {num_steps} batches")


def _is_equal(value: object, own: object) -> bool:
    """Whether settings are equal; saving may turn a tuple into a list, or a bool into an int."""
    if isinstance(own, list):
        return isinstance(value, list | tuple) and list(value) == own
    return isinstance(value, int | str | np.integer) and bool(value == own)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, int | str | list[int | str]]:
    """Return the settings of a sampler as integers, strings and lists of these."""
    return {name: _plain(value) for name, value in settings.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [f"{name}: {own}" for name, own in value.items()]
    if isinstance(value, list):
        return [_plain(own) for own in value]
    return int(value) if isinstance(value, bool | int) else str(value)
