"""The base class of optimizers that save and load their state by methods of their own."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.exchange import Algorithm, Caller, Group, RequestMismatch, WorkerLost
from gcnzc.optim.group_options import format_norms
from gcnzc.optim.method import DistributedOptimizer
from gcnzc.optim.resize import check_mapping, unpack_state
from gcnzc.optim.state import Field
from gcnzc.optim.state_layout import check_layout, check_param_groups, check_section
from gcnzc.optim.validation import check_rank


class Checkpointed(DistributedOptimizer):
    """A `DistributedOptimizer` whose state is not declared.

    Its constructor does not start: a subclass calls `connect` at the end of its own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        group: Group | None,
        signals: int,
        module: nn.Module | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.steps = self.skipped = 0
        self.extra_sums: Sequence[float] = ()
        """the sums of the extras over all ranks that `take_step` received, beginning with the
        common ones; empty if it received them itself or did not exchange"""
        super().__init__(
            params, defaults, group, signals=signals, module=module, total_steps=total_steps
        )

    def start(self) -> None:
        """See `DistributedOptimizer`; does nothing."""

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        return []

    def algorithm(self) -> Algorithm[None]:
        """See `DistributedOptimizer`; `take_step` returns why all ranks skipped the step."""
        caller_before = yield Caller(self.identity)
        self.check_dtypes()
        self.begin_step()
        if not self.is_broadcast:
            yield from self.broadcast_model_algorithm()
        self.skip_reason = ""
        self.received_signals = [False] * len(self.received_signals)
        self.extra_sums = ()
        try:
            skip_reason = yield from self.take_step()
        except RuntimeError as error:
            if not isinstance(error, RequestMismatch | WorkerLost):
                self.check_layouts()
            raise
        self.end_step(skip_reason)
        if self.comparison.is_due and (yield from self.compare_algorithm()):
            self.check_trainable()
        yield Caller(caller_before)

    def begin_step(self) -> None:
        """Check that a single rank has the parameters of the construction; see `algorithm`."""
        if self.group.world_size == 1:
            self.check_trainable()

    @abstractmethod
    def take_step(self) -> Algorithm[str]:
        """Exchange and update the parameters; a part of `algorithm`.

        Returns:
            Why all ranks skipped the step; empty if they took it.
        """

    def end_step(self, skip_reason: str) -> None:
        """Count a step that all ranks took or skipped, and receive its common extras.

        Args:
            skip_reason: the result of `take_step`.
        """
        self.skip_reason = skip_reason
        if skip_reason:
            self.skipped += 1
            return
        if self.extra_sums:
            self.receive_common(self.extra_sums)
        self.steps += 1
        if self.steps == self.late_step:
            self.warn_of_late_phase()

    def layout_lines(self) -> list[str]:
        """See `DistributedOptimizer`."""
        return []

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The names and tensors to broadcast: all parameters, and the module's dense buffers."""
        return super().tensors_to_broadcast()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy."""
        Optimizer.__setstate__(self, state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `DistributedOptimizer`."""
        snapshot = unpack_state(self.name, state_dict, self.group.rank)
        inner = snapshot.get("inner", snapshot)
        check_mapping(inner, "param_groups")
        check_param_groups(inner["param_groups"])
        self.check_loaded_options(inner["param_groups"])
        self.restore(snapshot)
        self.loaded_norms = format_norms(snapshot.get("shared", {}))
        self.mark_loaded()

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
