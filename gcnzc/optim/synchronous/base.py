"""The base class of optimizers that keep the replicas in sync at every step.

Their state is a few vectors over all parameters (`FlatParameters`), so that a step takes as many
collectives whatever the number of parameters. A step is taken by all
workers or by none: an element that is not finite on one of them makes all skip it, with their state
as it was.

Letters: n elements, d of them dense, W workers, k notes.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.compress import Compression, Dense, Reducer, WorkerInfo
from gcnzc.exchange import Algorithm, AllGather, Group
from gcnzc.optim.base import DistributedOptimizer, identified
from gcnzc.optim.flat_parameters import FlatParameters
from gcnzc.optim.group_options import option_lines
from gcnzc.optim.validation import check_above_zero, check_adam_options, check_parameters
from gcnzc.system.scalars import scalars_like


class Replicated(DistributedOptimizer):
    """The base of optimizers whose `step` exchanges with the other workers.

    Args:
        params: as torch's optimizers take them. A group's `compress=False` has its gradients
            exchanged densely at every step.
        defaults: options of the groups.
        group: of all workers; None for those of torch.distributed as it was initialised.
        clip_norm: largest norm of the gradient; all workers scale theirs by the same factor.
        signals: how many things, such as a wish to stop, are told with an exchange.
        total_steps: of the run; None if that is not known.
        module: see `DistributedOptimizer`.

    With torch's GradScaler, all ranks skip an exchanged step that overflows on one rank, and all
    lower their scales. In a step without an exchange, as 0/1 Adam has, only that rank skips, and
    its scale may then differ from those of the others.

    Raises:
        TypeError: a parameter is sharded, complex, or of a dtype that cannot be averaged.
        ValueError: the parameters of the workers differ in shape, dtype or order, or an option is
            out of range.
        WorkerLost: another worker is gone.
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
        self.space = FlatParameters(self.param_groups)
        self.is_trainable = self.trainable()
        self.clip_norm = clip_norm
        self.vectors: dict[str, Tensor] = {}
        """what is the same on all workers, (n,) each"""
        self.numbers: dict[str, Any] = {}
        """what is the same on all workers, besides the steps"""
        self.reducers: dict[str, Reducer] = {}
        """whose errors are this worker's own"""
        self._dense = self.reducer(Dense(), self.space.num_elements)
        self.connect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after the beginning: the vectors of a state are of all parameters at once."""
        if hasattr(self, "space"):
            raise ValueError(
                f"{type(self).__name__} takes no parameters later\n\nhint: give it all groups at "
                "the beginning; requires_grad may not change either"
            )
        super().add_param_group(param_group)

    def check_param_group(self, group: Mapping[str, Any]) -> None:
        """See `DistributedOptimizer`."""
        check_parameters(type(self).__name__, group["params"])
        check_adam_options(type(self).__name__, group)

    def reducer(self, compress: Compression, num_elements: int) -> Reducer:
        """What takes means of so many elements for this worker."""
        space, group = self.space, self.group
        place = WorkerInfo(group.rank, group.world_size, space.device, space.dtype)
        return compress.reducer(num_elements, place)

    def whole(self, compress: Compression, num_elements: int) -> Reducer:
        """The same for whole gradients, of which no checkpoint keeps errors.

        Raises:
            ValueError: it carries errors from one step to the next.
        """
        if getattr(compress, "has_feedback", False):
            raise ValueError(
                f"whole gradients by {compress}, which carries errors over that no checkpoint "
                "keeps\n\nhint: `dense` takes what has no error feedback"
            )
        return self.reducer(compress, num_elements)

    def bound_sums(self, sums: Tensor) -> Tensor:
        """Clamp sums of gradients in place so that a dense exchange of them cannot overflow.

        Sums are kept when a step is skipped. If their mean over the ranks or its square overflowed,
        all later dense steps would be skipped.
        """
        sent = getattr(self._dense, "dtype", self.space.dtype)
        largest = torch.finfo(sent).max / (2 * self.group.world_size)
        largest = min(largest, torch.finfo(self.space.dtype).max ** 0.5 / 2)
        return sums.clamp_(-largest, largest)

    def restore_sums(self, saved: Tensor) -> Tensor:
        """Copy sums of gradients from a state; elements that are not finite become 0.

        Older versions saved states with such elements.
        """
        sums = saved.to(self.space.device, self.space.dtype, copy=True)
        return self.bound_sums(sums.nan_to_num_(0.0, 0.0, 0.0))

    def layout(self) -> list[str]:
        """See `DistributedOptimizer`."""
        options = option_lines(self.param_groups, with_gpu=True)
        own = f"{type(self).__name__}, clip_norm {self.clip_norm}, {len(self.asks)} signals"
        return [own, *self.space.layout(), *options]

    @identified
    def algorithm(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: change the parameters on all workers alike, or on none."""
        if self.group.world_size == 1:
            self.check_trainable()
        yield from self.broadcast_model()
        values = self.space.empty(self.num_notes)
        self.space.read_gradients(values, self.gradient_factor())
        for part in self.space.parts:
            if part.group["maximize"]:
                values[part.begin : part.end].neg_()
        common = scalars_like(self.common_notes(), values)
        self.notes(values)[: self.num_common_notes] = common
        self.skip_reason = yield from self.advance(values)
        if self.skip_reason:
            self.skipped += 1
            self.heard = [False] * len(self.asks)
        else:
            self.steps += 1
            self.warn_of_late_phase(self.steps)
        if (yield from self.compare()):
            self.check_trainable()

    @abstractmethod
    def advance(self, values: Tensor) -> Algorithm[str]:
        """Take a step with the gradients of this worker.

        Args:
            values: (n + k,): the gradients, and notes, which begin with the common ones. May be
                used as memory to work in.

        Returns:
            Why no worker took it, in words; empty if all did.
        """

    @property
    def num_notes(self) -> int:
        """k: what travels with every exchange besides elements."""
        return self.num_common_notes

    def notes(self, values: Tensor) -> Tensor:
        """(k,): the notes of a vector."""
        return values[self.space.num_elements :]

    def hear(self, sums: Sequence[float]) -> None:
        """Update signals and comparison from the sums of the common notes, the first of `sums`."""
        bits, *signals = sums[: self.num_common_notes]
        self.comparison.receive(bits, self.group.world_size)
        self.heard = [share > 0 for share in signals]

    def dense_mean(self, values: Tensor) -> Algorithm[str]:
        """Replace all gradients by their means, clipped; see `Reducer.mean`."""
        skip_reason = yield from self._dense.mean(values, self.num_notes)
        if not skip_reason and self.clip_norm is not None:
            gradients = values[: self.space.num_elements]
            self._clip(gradients, gradients.double().square().sum())
        return skip_reason

    def clipped(self, values: Tensor) -> Algorithm[str]:
        """Scale the gradients of this worker by a factor that is the same on all workers.

        The norm is the root of the mean over the workers of their squared norms: at least that of
        the mean gradient, which nobody has. It costs 8 bytes to each worker.
        """
        if self.clip_norm is None:
            return ""
        gradients = values[: self.space.num_elements]
        squares = yield AllGather(gradients.double().square().sum()[None])
        # what is not finite is found by the exchange, which names the worker
        self._clip_finite(gradients, sum(squares.unbind()) / len(squares))
        return ""

    def _clip_finite(self, gradients: Tensor, square: Tensor) -> None:
        """Scale gradients to `clip_norm`, unless their squared norm (1,) or () is not finite."""
        self._clip(gradients, square.where(square.isfinite(), 0.0).reshape(()))

    def _clip(self, gradients: Tensor, square: Tensor) -> None:
        """Scale gradients in place, whose squared norm is () float64, to a norm of `clip_norm`."""
        assert self.clip_norm is not None, "asked for"
        if square.device.type == "cpu":
            norm = float(square) ** 0.5
            if norm > self.clip_norm:
                gradients *= self.clip_norm / (norm + 1e-6)
            return
        # the norm on a GPU stays there: the host would wait to read it
        norms = square.sqrt()
        gradients *= (self.clip_norm / (norms + 1e-6)).where(norms > self.clip_norm, 1.0)

    @property
    def state_bytes(self) -> int:
        """Memory that is kept from one step to the next, besides parameters and gradients."""
        vectors = sum(each.numel() * each.element_size() for each in self.vectors.values())
        return vectors + sum(reducer.state_bytes for reducer in self.reducers.values())

    def snapshot(self) -> dict[str, Any]:
        """What this worker goes on from: plain tensors, numbers and words.

        `shared` is the same on all workers; `errors` are this worker's own. The tensors are those
        of the optimizer, not copies.
        """
        # copied: the tensors move on in place, as torch's do, but half a state must not
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
            "errors": {name: each.errors() for name, each in self.reducers.items()},
            "parts": {name: list(each.part) for name, each in self.reducers.items()},
            "layout": self.space.layout(),
            "rank": self.group.rank,
            "world_size": self.group.world_size,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from what `snapshot` gave on this worker, or from what `resized` made of it.

        Raises:
            ValueError: it is of another worker, another number of workers or other parameters.
        """
        self.check_own(snapshot)
        counts = [len(group["params"]) for group in self.param_groups]
        saved = [len(group["params"]) for group in snapshot["param_groups"]]
        if counts != saved:
            raise ValueError(
                f"the state is of groups of {saved} parameters, not {counts}\n\n"
                "hint: load it into an optimizer of the same model"
            )
        for own, other in zip_longest(self.space.layout(), snapshot["layout"]):
            if own != other:
                raise ValueError(
                    f"the state is of {other or 'nothing more'}, where this optimizer has "
                    f"{own or 'nothing more'}\n\nhint: load it into an optimizer of the same model"
                )
        for group, other in zip(self.param_groups, snapshot["param_groups"], strict=True):
            group.update({name: value for name, value in other.items() if name != "params"})
        numbers = copy.deepcopy(dict(snapshot["shared"]["numbers"]))
        self.steps, self.skipped = numbers.pop("steps"), numbers.pop("skipped")
        self.numbers = numbers
        self.vectors = {
            name: vector.to("cpu" if name == "awake" else self.space.device, copy=True)
            for name, vector in snapshot["shared"]["vectors"].items()
        }
        # no broadcast after this: buffers differ between ranks in the middle of a run
        self.is_broadcast = True
        self.restore_errors(snapshot["errors"])

    def restore_errors(self, errors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Make what depends on the state that was loaded, and load the reducers' errors."""
        for name, reducer in self.reducers.items():
            reducer.load_errors(errors[name])
