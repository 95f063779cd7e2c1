"""Save and load the state of a strategy on one rank, including the state of its parts.

Notation: n elements of the flat parameter vector.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gcnzc.optim.resize import check_mapping
from gcnzc.optim.state_layout import check_inner_state, check_layout, check_vector

if TYPE_CHECKING:
    from gcnzc.optim.strategy.strategy import Strategy


PLACES = ("shared", "local", "shards")
"""the parts of a snapshot that have vectors"""
MEAN = "next"
"""the name of the mean of a `DelayedRound`"""


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
        ValueError: it is the state of another rank, of another number of ranks, of other
            parameters, or was saved with other options. Nothing is loaded then.
    """
    keys = "inner", "shared", "local", "shards", "errors", "rank", "world_size"
    check_mapping(snapshot, *keys)
    shared, local, shards = (snapshot[name] for name in ("shared", "local", "shards"))
    check_mapping(shared, "numbers")
    numbers, interval, parts = shared["numbers"], strategy.sync_interval, strategy.recipe.parts
    check_mapping(numbers, "steps", "since", "local_steps", "is_plain")
    strategy.check_rank_state(snapshot)
    _check_parameters(strategy, snapshot)
    if not numbers["is_plain"]:
        for part in parts:
            part.check_state(shared, local, shards)
        if not strategy.is_inner_only:
            _check_vectors(strategy, snapshot)
    for name, reducer in strategy.reducers.items():
        reducer.check_errors(snapshot["errors"].get(name, {}))
    strategy.inner.load_state_dict(snapshot["inner"])
    strategy.share_inner_state()
    strategy.steps, strategy.steps_since_sync = numbers["steps"], numbers["since"]
    # states of older versions have no counters; with another number of ranks they are means
    counters = local.get("counters", torch.zeros(2)).tolist()
    strategy.skipped, strategy.dropped = map(round, counters)
    if interval.requested == "auto" and numbers["local_steps"]:
        interval.steps, interval.is_measuring = numbers["local_steps"], False
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
        # states of older versions have `num_exchanges` in `shared`, or not at all
        num_exchanges = local.get("num_exchanges", shared.get("num_exchanges", 0))
        strategy.num_exchanges = round(float(num_exchanges))
        strategy.steps_since_sync = round(float(local.get("since", strategy.steps_since_sync)))
    for part in parts:
        load = part.load_alone if strategy.is_inner_only else part.load
        load(shared, local, shards)


def _check_parameters(strategy: "Strategy", snapshot: Mapping[str, Any]) -> None:
    if "layout" not in snapshot:
        # a state of an older version has only the vector of all parameters
        vector = {**snapshot["local"], **snapshot["shared"]}["parameters"]
        counts = strategy.flat_params.num_elements, len(vector)
        check_layout(*([f"{count} elements"] for count in counts))
    check_inner_state(strategy.inner, snapshot["inner"])
    shared = snapshot["shared"]
    # those of one rank may have overflowed in its last step
    is_shared = "parameters" in shared
    check_vector(
        shared if is_shared else snapshot["local"],
        "parameters",
        strategy.flat_params.num_elements,
        is_finite=is_shared,
    )


def _check_vectors(strategy: "Strategy", snapshot: Mapping[str, Any]) -> None:
    for part in strategy.recipe.parts:
        for name, num_elements in part.vector_sizes().items():
            place = next((each for each in PLACES if name in snapshot[each]), "shared")
            # as for the parameters; a mean that is not applied may have overflowed
            is_finite = place != "local" and name != MEAN
            check_vector(snapshot[place], name, num_elements, is_finite=is_finite)
