"""The base class of optimizers that keep the replicas in sync at every exchange.

Their state is a few flat vectors over all parameters (`FlatParameters`), so the number of
collectives of a step does not depend on the number of parameters. If a gradient element is not
finite on any rank, or its square would overflow, all ranks skip a step with an exchange, and their
state does not change.

Notation: n elements, the first d of them in groups with `compress=False`, W ranks, k extras:
numbers that are exchanged with a vector, such as signals.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression, Dense, Reducer
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, AllGather, Group
from gcnzc.kernels.finite import mark_large, square_limit
from gcnzc.optim.checkpointed import Checkpointed
from gcnzc.optim.flat_parameters import FlatParameters
from gcnzc.optim.group_options import option_lines
from gcnzc.optim.resize import check_mapping
from gcnzc.optim.state_layout import check_group_lengths, check_value
from gcnzc.optim.validation import check_above_zero, check_adam_options


class Replicated(Checkpointed):
    """The base class of optimizers that keep the replicas in sync at every exchange.

    Args:
        params: an iterable of parameters or parameter groups, as for torch's optimizers. The
            gradients of a group with `compress=False` are exchanged at every step.
        defaults: default options of the parameter groups.
        group: the ranks that communicate; see `DistributedOptimizer`.
        clip_norm: the maximum gradient norm; None does not clip, and steps with gradients above
            `gcnzc.kernels.finite.square_limit` are skipped. A step that exchanges
            gradients clips their mean. In a compressed step all ranks scale their gradients by the
            same factor, which follows from the root mean square of their norms.
        signals: the number of flags, such as a request to stop, that each exchange combines over
            the ranks.
        total_steps: the number of steps of the run; None if it is not known.
        module: see `DistributedOptimizer`.

    With torch's GradScaler, all ranks skip an exchanged step that overflows on one rank, and all
    lower their scales. In a step without an exchange, as 0/1 Adam has, only that rank ignores its
    gradients: it steps with its unchanged momentum, and its scale may then differ from those of the
    others.

    Raises:
        TypeError: a parameter is sharded, complex, or of a dtype that cannot be averaged.
        ValueError: the parameters of the ranks differ in shape, dtype or order, or an option is
            out of range.
        WorkerLost: another rank did not respond in time, or its process has ended.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        group: Group | None = None,
        *,
        clip_norm: float | None = None,
        signals: int = 0,
        total_steps: int | None = None,
        module: nn.Module | None = None,
    ) -> None:
        if clip_norm is not None:
            check_above_zero("clip_norm", clip_norm)
        options = {"compress": True, "maximize": False, **defaults}
        super().__init__(params, options, group, signals, module, total_steps)
        self.fill_state()
        self.flat_params = FlatParameters(self.param_groups)
        self.record_parameters()
        self.clip_norm = clip_norm
        limit = square_limit(self.flat_params.dtype)
        # clipped gradients cannot overflow the state
        self._clips_large = clip_norm is not None and clip_norm <= limit
        self.vectors: dict[str, Tensor] = {}
        """the part of the state that is equal on all ranks, mostly vectors (n,)"""
        self.numbers: dict[str, Any] = {}
        """other values of the state that are equal on all ranks"""
        self.max_extras = self.num_common_extras
        """the largest number of extras of an exchange"""
        self._gradient_reducer = self.reducer(Dense(), self.flat_params.num_elements)
        self.connect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; not supported after construction.

        Raises:
            ValueError: the optimizer is constructed already, so its flat vectors are laid out.
        """
        if hasattr(self, "flat_params"):
            raise ValueError(
                f"{type(self).__name__} does not support adding parameters\n\nhint: give all "
                "groups to the constructor; requires_grad may not change either"
            )
        super().add_param_group(param_group)

    def check_options(
        self, group: Mapping[str, Any], where: str = "", *, with_gpu: bool = True
    ) -> None:
        """See `DistributedOptimizer`."""
        check_adam_options(type(self).__name__, group, where, with_gpu=with_gpu)

    def reducer(self, compress: Compression, num_elements: int) -> Reducer:
        """Return a reducer of this rank for vectors of `num_elements`."""
        group = self.group
        worker_info = self.flat_params.worker_info(group.rank, group.world_size, num_elements)
        return compress.reducer(num_elements, worker_info)

    def gradient_reducer(self, compress: Compression, num_elements: int) -> Reducer:
        """Return a reducer for exchanged gradients, whose compression must not use error feedback.

        Raises:
            TypeError: it is not a compression, but for example the name of one.
            ValueError: the compression uses error feedback.
        """
        check_compression(compress, "gradient_compression")
        if getattr(compress, "has_feedback", False):
            raise ValueError(
                f"gradient_compression is {compress}, which uses error feedback, but checkpoints "
                "do not contain compression errors of gradients\n\nhint: give a compression "
                "without error feedback"
            )
        return self.reducer(compress, num_elements)

    def bound_sums(self, sums: Tensor) -> Tensor:
        """Clamp sums of gradients in place so that their exchange cannot overflow.

        Pending sums survive a skipped step. If their mean or a norm overflowed, every later
        gradient step would be skipped too.
        """
        sent = getattr(self._gradient_reducer, "dtype", self.flat_params.dtype)
        largest = torch.finfo(sent).max / (2 * self.group.world_size)
        largest = min(largest, square_limit(self.flat_params.dtype) / 2)
        return sums.clamp_(-largest, largest)

    def restore_sums(self, saved: Tensor) -> Tensor:
        """Copy sums of gradients from a state, which may be of another number of ranks."""
        return self.bound_sums(saved.to(self.flat_params.device, self.flat_params.dtype, copy=True))

    def layout_lines(self) -> list[str]:
        """See `DistributedOptimizer`."""
        options = option_lines(self.param_groups, with_gpu=True)
        own = f"{type(self).__name__}, clip_norm {self.clip_norm}, {len(self.signals)} signals"
        return [own, *self.flat_params.layout(), *options]

    def take_step(self) -> Algorithm[str]:
        """See `DistributedOptimizer`: take the step on all ranks, or skip it on all."""
        factor, common = self.gradient_factor(), self.common_extras()
        flat_params = self.flat_params
        values = flat_params.gradients_and_extras(factor, common, self.max_extras)
        if not self._clips_large:
            mark_large(values[: flat_params.num_elements])
        for part in flat_params.parts:
            if part.group["maximize"]:
                values[part.begin : part.end].neg_()
        return self.advance(values)

    @abstractmethod
    def advance(self, values: Tensor) -> Algorithm[str]:
        """Take a step with the gradients of this rank.

        If the ranks exchange the common extras, it sets `extra_sums` to the sums of the extras.

        Args:
            values: (n + max_extras,): the gradients and the extras, which begin with the common
                ones; may be overwritten, and is valid until the end of the step.

        Returns:
            Why all ranks skipped the step; empty if they took it.
        """

    def mean_gradients(self, values: Tensor) -> Algorithm[str]:
        """Replace gradients (n + k,) by their clipped means over the ranks; see `Reducer.mean`."""
        count = self.flat_params.num_elements
        skip_reason = yield from self._gradient_reducer.mean(values, len(values) - count)
        if not skip_reason and self.clip_norm is not None:
            gradients = values[:count]
            self._clip(gradients, gradients.double().square().sum())
        return skip_reason

    def clip_gradients(self, values: Tensor) -> Algorithm[str]:
        """Clip the gradients of this rank by a factor that is equal on all ranks.

        The norm is the root mean square of the ranks' gradient norms. It bounds the norm of the
        mean gradient, which is not computed in compressed steps. Each rank sends 8 bytes to each
        other rank.
        """
        if self.clip_norm is None:
            return ""
        gradients = values[: self.flat_params.num_elements]
        squares = yield AllGather(gradients.double().square().sum()[None])
        # the exchange detects gradients that are not finite, and names the rank
        self._clip_finite(gradients, sum(squares.unbind()) / len(squares))
        return ""

    def _clip_finite(self, gradients: Tensor, square: Tensor) -> None:
        """Scale gradients to `clip_norm`, unless their squared norm (1,) or () is not finite."""
        self._clip(gradients, square.where(square.isfinite(), 0.0).reshape(()))

    def _clip(self, gradients: Tensor, square: Tensor) -> None:
        """Scale gradients in place, whose squared norm is () float64, to a norm of `clip_norm`."""
        assert self.clip_norm is not None, "callers check it"
        if square.device.type == "cpu":
            norm = float(square) ** 0.5
            if norm > self.clip_norm:
                gradients *= self.clip_norm / (norm + 1e-6)
            return
        # a norm on a GPU is not read, because reading it synchronizes with the GPU
        norms = square.sqrt()
        gradients *= (self.clip_norm / (norms + 1e-6)).where(norms > self.clip_norm, 1.0)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state between steps, without parameters, gradients and scratch."""
        vectors = sum(each.numel() * each.element_size() for each in self.vectors.values())
        return vectors + self.error_bytes

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this rank as plain tensors, numbers and strings.

        `shared` is equal on all ranks; `errors` are the compression errors of this rank. The
        tensors are not copied.
        """
        # the numbers are copied, so that lists among them do not change with later steps
        numbers = {"steps": self.steps, "skipped": self.skipped, **copy.deepcopy(self.numbers)}
        groups, first = [], 0
        for group in self.param_groups:
            places = list(range(first, first := first + len(group["params"])))
            groups.append({**group, "params": places})
        return {
            "param_groups": groups,
            "shared": {"numbers": numbers, "vectors": dict(self.vectors)},
            "local": {},
            "shards": {},
            "parts": {name: list(each.part) for name, each in self.reducers.items()},
            **self.rank_state(),
        }

    def state_layout(self) -> list[str]:
        """See `DistributedOptimizer`."""
        return self.flat_params.layout()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a `snapshot` of this rank, or a result of `resize_state`.

        Raises:
            ValueError: it is of another rank, another number of ranks or other parameters, or is
                damaged. Nothing is loaded then.
        """
        check_group_lengths(self.param_groups, snapshot["param_groups"])
        self.check_rank_state(snapshot)
        self.check_state(snapshot)
        reducers = self.make_reducers(snapshot["shared"]["numbers"])
        for name, reducer in reducers.items():
            reducer.check_errors(snapshot["errors"].get(name, {}))
        for group, other in zip(self.param_groups, snapshot["param_groups"], strict=True):
            group.update({name: value for name, value in other.items() if name != "params"})
        numbers = copy.deepcopy(dict(snapshot["shared"]["numbers"]))
        self.steps, self.skipped = numbers.pop("steps"), numbers.pop("skipped")
        self.numbers = numbers
        self.vectors = {
            name: vector.to("cpu" if name == "had_gradient" else self.flat_params.device, copy=True)
            for name, vector in snapshot["shared"]["vectors"].items()
        }
        # no broadcast after this: buffers differ between ranks in the middle of a run
        self.is_broadcast = True
        self.reducers = reducers
        for reducer in reducers.values():
            reducer.active = self.vectors.get("active")
        self.load_errors(snapshot["errors"])

    def check_state(self, snapshot: Mapping[str, Any]) -> None:
        """Check the numbers and tensors of a snapshot, before anything is loaded.

        Raises:
            ValueError: one is missing or damaged.
        """
        shared = snapshot["shared"]
        check_mapping(shared, "vectors")
        check_mapping(shared["vectors"])
        for name in ("steps", "skipped"):
            check_value(shared["numbers"], name)

    def make_reducers(self, numbers: Mapping[str, Any]) -> dict[str, Reducer]:
        """Return the reducers for a state with these numbers."""
        return self.reducers
