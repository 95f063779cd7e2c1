"""The state of a distributed optimizer: reducers by name, snapshots, and state dicts."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gcnzc.compress import Reducer
from gcnzc.exchange import Group
from gcnzc.optim.group_options import Comparison, format_norms
from gcnzc.optim.resize import check_mapping, check_state_dict_options, pack_state, unpack_state
from gcnzc.optim.state_layout import check_layout, check_param_groups, check_section
from gcnzc.optim.validation import check_rank


class Checkpointed(Optimizer):
    """Base class of `DistributedOptimizer` that saves and loads the state of an optimizer."""

    group: Group
    comparison: Comparison
    steps: int
    """number of steps taken"""
    loaded: str
    """description of the state that was loaded last, which ranks compare"""
    loaded_norms: str
    """norms of its tensors that are equal on all ranks, which ranks compare too"""
    reducers: dict[str, Reducer]
    """reducers by name; checkpoints have their compression errors, which are this rank's own"""

    @property
    def name(self) -> str:
        """The name of the type of optimizer, in messages, states and headers of requests."""
        return type(self).__name__

    @abstractmethod
    def check_loaded_options(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Check the options of the parameter groups of a state, before it is loaded."""

    def fill_state(self) -> None:
        """Add an empty entry to `state` for each parameter.

        Otherwise torch.distributed.checkpoint would call `step` to initialize the state.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state.setdefault(parameter, {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank in the layout of torch's optimizers.

        `state` has the step count of each trained parameter. Its entry for the first trained
        parameter also has, as bytes, the state that is the same on all ranks, and the state of this
        rank, such as its compression errors. The key of the latter contains the rank, because
        torch.distributed.checkpoint saves an entry with the same key on several ranks only once.

        Raises:
            ValueError: the option `full_state_dict` or `flatten_optimizer_state_dict` of torch's
                `get_optimizer_state_dict` or `set_optimizer_state_dict` is set.
        """
        check_state_dict_options()
        return pack_state(self.name, self.snapshot(), self.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` or `snapshot` of this rank, or a result of `resize_state`.

        Raises:
            ValueError: the state belongs to another rank, number of ranks, type of optimizer or
                model, is damaged, or has an option that is out of its range. Nothing is loaded
                then.
        """
        snapshot = unpack_state(self.name, state_dict, self.group.rank)
        inner = snapshot.get("inner", snapshot)
        check_mapping(inner, "param_groups")
        check_param_groups(inner["param_groups"])
        self.check_loaded_options(inner["param_groups"])
        self.restore(snapshot)
        self.loaded_norms = format_norms(snapshot.get("shared", {}))
        self.mark_loaded()

    def mark_loaded(self) -> None:
        """Request a comparison with the other ranks, which must have loaded a state too."""
        self.loaded = f"of step {self.steps}"
        self.comparison.is_requested = True

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return the state of this rank: tensors, which are not copied, and plain values.

        `shared` is the same on all ranks; `local`, `shards` and `errors` are this rank's own.
        """

    @abstractmethod
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a `snapshot` of this rank.

        Raises:
            ValueError: the state belongs to another rank, number of ranks or other parameters.
        """

    @abstractmethod
    def state_layout(self) -> list[str]:
        """Return a line for each parameter, such as its shape, which a state must have too."""

    def errors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the compression errors of each reducer by its name."""
        return {name: each.errors() for name, each in self.reducers.items()}

    def load_errors(self, errors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load a result of `errors`; errors that are missing become 0."""
        for name, reducer in self.reducers.items():
            reducer.load_errors(errors.get(name, {}))

    @property
    def error_bytes(self) -> int:
        """The memory of the compression errors, in bytes."""
        return sum(each.state_bytes for each in self.reducers.values())

    def rank_state(self) -> dict[str, Any]:
        """Return the entries of a snapshot that all optimizers with a state of each rank have.

        They are the compression errors, the layout of the parameters, and the rank.
        """
        return {
            "errors": self.errors(),
            "layout": self.state_layout(),
            "rank": self.group.rank,
            "world_size": self.group.world_size,
        }

    def check_rank_state(self, snapshot: Mapping[str, Any]) -> None:
        """Check that a snapshot is of this rank, number of ranks and parameters.

        Raises:
            ValueError: it is of another rank, number of ranks, or layout of the parameters, or a
                section is missing or not a mapping.
        """
        check_mapping(
            snapshot, "shared", "local", "shards", "errors", "layout", "rank", "world_size"
        )
        for name in ("shared", "local", "shards", "errors"):
            check_section(snapshot, name)
        check_section(snapshot["shared"], "numbers")
        check_rank(snapshot, self.group)
        check_layout(self.state_layout(), snapshot["layout"])
