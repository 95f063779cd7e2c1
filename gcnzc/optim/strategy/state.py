"""Save and load the state of a strategy on one rank, including the state of its parts.

Notation: n elements of the flat parameter vector.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gcnzc.optim.resize import check_mapping
from gcnzc.optim.state_layout import SavedTensor, check_inner_state, check_tensor, check_value

if TYPE_CHECKING:
    from gcnzc.optim.strategy.strategy import Strategy


SECTIONS = ("shared", "local", "shards")
"""the parts of a snapshot that have tensors"""
COUNTERS = {"counters": (2,), "num_exchanges": (), "since": ()}
"""the shapes of tensors of counters in `local`"""


def take_snapshot(strategy: "Strategy") -> dict[str, Any]:
    """Return the state of this rank, while no exchange is running; the tensors are not copied.

    `gcnzc.optim.resize_state` converts the states for another number of ranks. The keys are

        inner    the inner optimizer's state
        shared   tensors, numbers and strings that are equal on all ranks
        local    this rank's counters, and tensors, with `parameters` (n,) unless in sync
        shards   this rank's shards of sharded vectors
        errors   the compression errors of each reducer
        layout   a line for each trained parameter, with its shape and dtype
        rank, world_size
    """
    # a single rank has no state of the recipe, and neither has any rank before the first step
    is_plain = strategy.is_inner_only or not strategy.is_broadcast
    interval = strategy.sync_interval
    is_uniform = strategy.recipe.policy.is_uniform
    numbers = {
        "steps": strategy.steps,
        "since": strategy.steps_since_sync if is_uniform else 0,
        "local_steps": 0 if interval.is_measuring else interval.steps,
        "is_plain": is_plain,
    }
    shared: dict[str, Any] = {"numbers": numbers}
    # floats, so that `resize_state` computes their means
    counters = torch.tensor([strategy.skipped, strategy.dropped], dtype=torch.float64)
    local: dict[str, Tensor] = {"counters": counters}
    shards: dict[str, Tensor] = {}
    (shared if strategy.is_in_sync else local)["parameters"] = strategy.vector()
    if not is_plain:
        if is_uniform:
            shared["num_exchanges"] = strategy.num_exchanges
        else:
            counts = torch.tensor(
                [strategy.num_exchanges, strategy.steps_since_sync], dtype=torch.float64
            )
            local["num_exchanges"], local["since"] = counts
        for part in strategy.recipe.parts:
            shared |= part.shared_state()
            local |= part.local_state()
            shards |= part.shard_state()
    return {
        "inner": strategy.inner.state_dict(),
        "shared": shared,
        "local": local,
        "shards": shards,
        **strategy.rank_state(),
    }


def load_snapshot(strategy: "Strategy", snapshot: Mapping[str, Any]) -> None:
    """Load a snapshot of this rank, or a result of `gcnzc.optim.resize_state`.

    Raises:
        ValueError: a value is missing or damaged; or it is the state of another rank, of another
            number of ranks, of other parameters, or was saved with other options. Nothing is loaded
            then.
    """
    check_mapping(snapshot, "inner")
    strategy.check_rank_state(snapshot)
    shared, local, shards = (snapshot[section] for section in SECTIONS)
    numbers, interval, parts = shared["numbers"], strategy.sync_interval, strategy.recipe.parts
    is_uniform = strategy.recipe.policy.is_uniform
    for name in ("steps", "since", "local_steps"):
        check_value(numbers, name)
    check_value(numbers, "is_plain", kind=bool)
    _check_parameters(strategy, snapshot)
    if not numbers["is_plain"]:
        if is_uniform:
            check_value(shared, "num_exchanges")
        for part in parts:
            part.check_state(shared, local, shards)
        _check_tensors(strategy, snapshot)
    for name, reducer in strategy.reducers.items():
        reducer.check_errors(snapshot["errors"].get(name, {}))
    strategy.inner.load_state_dict(snapshot["inner"])
    strategy.share_inner_state()
    strategy.steps, strategy.steps_since_sync = numbers["steps"], numbers["since"]
    # with another number of ranks, the counters are means
    strategy.skipped, strategy.dropped = map(round, local["counters"].tolist())
    if interval.requested == "auto" and numbers["local_steps"]:
        interval.measured = numbers["local_steps"]
    strategy.load_errors(snapshot["errors"])
    strategy.is_broadcast, strategy.is_in_sync = True, "parameters" in shared
    own = (shared if strategy.is_in_sync else local)["parameters"]
    strategy.flat_params.write_parameters(strategy.vector(own))
    if numbers["is_plain"]:
        # the state of a single rank has no state of the recipe
        if not strategy.is_inner_only:
            strategy.initialize()
        return
    if not strategy.is_inner_only:
        if is_uniform:
            strategy.num_exchanges = shared["num_exchanges"]
        else:
            strategy.num_exchanges = round(float(local["num_exchanges"]))
            strategy.steps_since_sync = round(float(local["since"]))
    for part in parts:
        load = part.load_alone if strategy.is_inner_only else part.load
        load(shared, local, shards)


def _check_parameters(strategy: "Strategy", snapshot: Mapping[str, Any]) -> None:
    """Check the parameters, the counters and the state of the inner optimizer."""
    check_inner_state(strategy.inner, snapshot["inner"])
    shared, local = snapshot["shared"], snapshot["local"]
    # those of one rank may have overflowed in its last step
    is_shared = "parameters" in shared
    vector = SavedTensor((strategy.flat_params.num_elements,), may_overflow=not is_shared)
    check_tensor(shared if is_shared else local, "parameters", vector)
    has_own = not (strategy.recipe.policy.is_uniform or shared["numbers"]["is_plain"])
    for name, shape in COUNTERS.items():
        if has_own or name == "counters":
            check_tensor(local, name, SavedTensor(shape, least=0))


def _check_tensors(strategy: "Strategy", snapshot: Mapping[str, Any]) -> None:
    """Check the tensors of the parts of the recipe."""
    for part in strategy.recipe.parts:
        expected = part.saved_tensors(snapshot)
        for name, each in expected.items():
            section = next((one for one in SECTIONS if name in snapshot[one]), "shared")
            # as for the parameters
            may_overflow = each.may_overflow or section == "local"
            check_tensor(snapshot[section], name, replace(each, may_overflow=may_overflow))
