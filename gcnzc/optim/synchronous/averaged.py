"""Synchronous data parallelism: average the gradients of all ranks in every step.

The mean is weighted by the optimizer's attribute `weight`, which is 1 on all ranks by default. If a
rank sets it to its batch size divided by the mean batch size over the ranks, a step equals that of
one rank on all minibatches. The averaged vector also has a flag for each parameter, whether it has
a gradient, and signals such as a request to stop.

Notation: W ranks, P parameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense, Reducer, WorkerInfo
from gcnzc.compress.reducer import check_error_values
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, AllToAll, Group, Mean
from gcnzc.exchange.layout import group_by_dtype
from gcnzc.exchange.sync import check_same
from gcnzc.kernels.finite import can_be_squared, mark_large
from gcnzc.optim.finite_gradients import count_bad_elements, have_finite_gradients
from gcnzc.optim.flat import FlatParameters, to_device
from gcnzc.optim.group_options import option_lines, trained_lines
from gcnzc.optim.method import SkipStep, WrappingOptimizer
from gcnzc.optim.resize import check_is_inner
from gcnzc.optim.state import Errors, Field, Inner, Values
from gcnzc.optim.state_layout import add_counts, check_inner_state, split_counts
from gcnzc.optim.validation import check_above_zero
from gcnzc.system.scalars import read_scalars, scalars_like

# Steps of an optimizer at some elements of its parameters only.
#
# With a sparse compression and error feedback, each element of the mean gradient is 0 in most
# steps. When the element is sent, it is the sum of its gradients since it was last sent.
# Heavy-ball momentum would apply that sum again in the following steps, without new gradients
# that correct it. A masked step leaves parameters and momentum unchanged where no rank has sent
# an element, so an element's momentum is updated as often as its gradient.


Momentum: TypeAlias = Literal["everywhere", "masked"]


def choose_momentum(momentum: Momentum | None, compress: Compression | None) -> Momentum:
    """Return the argument `momentum` of `Averaged`, or the default for a compression.

    Raises:
        ValueError: there is no such value, or it is "masked" without compression.
    """
    if momentum is None:
        return "everywhere" if compress is None else compress.momentum
    if momentum not in get_args(Momentum):
        raise ValueError(
            f"momentum={momentum!r}\n\nhint: use one of {', '.join(get_args(Momentum))}, or None"
        )
    if momentum == "masked" and compress is None:
        raise ValueError(
            "momentum='masked' without compression, which sends all elements\n\nhint: also give a "
            "sparse compression, such as compress=RandomK(0.05)"
        )
    return momentum


@torch.no_grad()
def step_on_supports(inner: Optimizer, supports: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Take an optimizer's step, and undo it at the elements that are not in a support.

    It undoes changes of the parameters and of the tensors of the optimizer's state that have a
    parameter's shape. A tensor that the step creates becomes 0 there. The state `step`, with which
    Adam corrects its bias, counts all steps.

    Args:
        inner: the optimizer.
        supports: parameters, and for each a bool mask of its shape. The step is not restricted for
            other parameters.
    """
    saved = [
        ({name: each.clone() for name, each in _elementwise(inner, parameter)}, parameter.clone())
        for parameter, _ in supports
    ]
    inner.step()
    for (parameter, support), (state, values) in zip(supports, saved, strict=True):
        torch.where(support, parameter, values, out=parameter.detach())
        for name, tensor in _elementwise(inner, parameter):
            if name in state:
                torch.where(support, tensor, state[name], out=tensor)
            else:
                tensor.masked_fill_(~support, 0)


def _elementwise(inner: Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of a parameter's state that have an element for each of its elements."""
    # the count of steps has the shape of a parameter that is a scalar
    return [
        (name, each)
        for name, each in inner.state.get(parameter, {}).items()
        if isinstance(each, Tensor) and each.shape == parameter.shape and name != "step"
    ]


# The layouts of gradients, and the mean of a sparse gradient over the ranks.


NONE, DENSE, SPARSE = 0, 1, 2


def gradient_layout(parameter: nn.Parameter) -> int:
    """Return the layout of a parameter's gradient: `NONE`, `DENSE` or `SPARSE`."""
    if parameter.grad is None:
        return NONE
    return SPARSE if parameter.grad.is_sparse else DENSE


def mean_of_sparse(parameter: nn.Parameter, factor: float | Tensor) -> Algorithm[Tensor | None]:
    """Return the weighted mean of a sparse gradient over the ranks; None if no rank has one.

    It is a coalesced sparse tensor with the rows of all ranks.
    """
    gradient = parameter.grad
    columns = parameter.shape[1:]
    rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *columns)
    if gradient is not None:
        gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
        gradient = gradient.coalesce()
        rows, values = (
            gradient.indices()[0],
            gradient.values() * to_device(factor, parameter.device),
        )
    counts = yield AllGatherScalar(len(rows))
    if not sum(counts):
        return None
    width = columns.numel()
    everywhere = len(counts)
    all_rows = yield AllToAll([rows] * everywhere, counts)
    flat = values.reshape(-1)
    all_values = yield AllToAll([flat] * everywhere, [count * width for count in counts])
    return torch.sparse_coo_tensor(
        torch.cat(all_rows)[None],
        torch.cat(all_values).view(-1, *columns) / everywhere,
        parameter.shape,
        check_invariants=False,
    ).coalesce()


class Averaged(WrappingOptimizer):
    """Wraps an optimizer of torch and averages the gradients of all ranks before its `step`.

    Rank 0's parameters are broadcast at the start. A missing gradient counts as zeros if another
    rank has one. If no rank has a gradient of a parameter, the inner optimizer skips the parameter.
    Sparse gradients stay sparse, also while they are exchanged. Parameters may be frozen, unfrozen
    and added between two steps, in the same way on all ranks; this resets the compression errors.

    If a gradient is not finite on one rank, or the mean of gradients is too large to be squared,
    all ranks skip the step. With torch's GradScaler, they also lower their scales.

    If ranks have batches of different sizes, set `weight` before each `step`.

    Args:
        inner: the optimizer of this rank's parameters. The wrapper shares its parameter groups and
            state, so learning rate schedulers work.
        group: the ranks that communicate; see `DistributedOptimizer`.
        signals: the number of flags, such as a request to stop, that are exchanged with the
            gradients.
        compress: compression of float32 and float64 gradients; None averages them uncompressed.
            With a compression that has error feedback, such as `Sign`, each rank adds its
            compression error to its next gradient.
        clip_norm: the maximum norm of the mean gradient over all parameters; None does not clip.
        momentum: with "masked", a step changes parameters and their state, such as momentum, only
            at the elements that the ranks have sent (`Reducer.support`), also by weight decay; with
            "everywhere", at all elements. None is "masked" for sparse compressions with error
            feedback, whose training may diverge with "everywhere", and "everywhere" for others.
        module: see `DistributedOptimizer`.

    Raises:
        TypeError: the inner optimizer communicates itself or needs a closure, or a parameter is
            sharded, complex, or of a dtype that cannot be averaged.
        ValueError: an option is out of range.
    """

    may_share = True
    """whether the state is the same on all ranks without compression"""
    compared_options = ("inner_name", "compress", "clip_norm", "momentum")

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        signals: int = 0,
        *,
        compress: Compression | None = None,
        clip_norm: float | None = None,
        momentum: Momentum | None = None,
        module: nn.Module | None = None,
    ) -> None:
        if clip_norm is not None:
            check_above_zero("clip_norm", clip_norm)
        check_compression(compress)
        self.compress, self.clip_norm = compress, clip_norm
        self.momentum = choose_momentum(momentum, compress)
        self.is_shared = compress is None and self.may_share
        self.inner_name = type(inner).__name__
        self.broadcast_names: set[str] = set()
        """names of the tensors that were broadcast; tensors of a copy have other ids"""
        super().__init__(inner, group, signals=signals, module=module)

    def start(self) -> None:
        """See `DistributedOptimizer`."""
        self.share_inner_state()
        self._lay_out()
        self.connect()

    def fill_state(self) -> None:
        """See `DistributedOptimizer`; a state that all ranks share is the inner optimizer's."""
        if not self.is_shared:
            super().fill_state()

    def _lay_out(self) -> None:
        """Lay out the gradients for the current parameters and their `requires_grad`."""
        for group in self.param_groups:
            self.check_param_group(group)
        self.record_parameters()
        self.gradients = Gradients(self.named_parameters(), self.compress, self.describe_worker())
        self.declared = self._declare_state()
        # parameters may have been added
        self.is_broadcast = False

    def layout_lines(self) -> list[str]:
        """See `DistributedOptimizer`; the first step compares options of parameter groups."""
        return [self.describe_options()]

    def tensors_to_broadcast(self) -> list[tuple[str, Tensor]]:
        """See `DistributedOptimizer`: those that were not broadcast before."""
        tensors = super().tensors_to_broadcast()
        return [pair for pair in tensors if pair[0] not in self.broadcast_names]

    def on_broadcast(self) -> None:
        """See `DistributedOptimizer`."""
        self.broadcast_names |= {name for name, _ in super().tensors_to_broadcast()}

    # --- the state

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        return [*super().declare(), Inner(self), GradientErrors(self)]

    def state_layout(self) -> list[str]:
        """See `DistributedOptimizer`: names and shapes."""
        return [f"{name} {tuple(each.shape)}" for name, each in self.named_parameters()]

    def describe_worker(self) -> WorkerInfo:
        """See `DistributedOptimizer`; the gradients may be of several dtypes."""
        device = self.param_groups[0]["params"][0].device
        return WorkerInfo(self.group.rank, self.group.world_size, device, torch.float32)

    def snapshot(self) -> dict[str, Any]:
        """See `DistributedOptimizer`.

        Without compression, it is the same on all ranks: the inner optimizer's, with `add_counts`.
        """
        if self.is_shared:
            return add_counts(self.inner.state_dict(), steps=self.steps, skipped=self.skipped)
        return super().snapshot()

    def state_dict(self) -> dict[str, Any]:
        """Return the state; see `snapshot`."""
        return self.snapshot() if self.is_shared else super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; without compression, a state dict of the inner optimizer."""
        if not self.is_shared:
            super().load_state_dict(state_dict)
            return
        inner, counts = split_counts(state_dict)
        self.check_loaded_options(inner["param_groups"])
        check_is_inner(state_dict)
        check_inner_state(self.inner, inner)
        self.inner.load_state_dict(inner)
        for group, loaded in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(loaded)
        self.is_broadcast = True
        self.on_load()
        self.skipped = counts.get("skipped", self.skipped)
        self.steps = counts["steps"] if "steps" in counts else self._count_inner_steps()
        self.mark_loaded()

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        self.on_broadcast()

    def _count_inner_steps(self) -> int:
        """Return the inner optimizer's number of steps; the current one if it has none, as SGD."""
        counts = [int(each["step"]) for each in self.state.values() if "step" in each]
        return max(counts, default=self.steps)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; call it on all ranks before the same step."""
        if not hasattr(self, "gradients"):
            # the constructor of torch's Optimizer calls this
            super().add_param_group(param_group)
            return
        self.inner.add_param_group(param_group)
        try:
            self._lay_out()
        except (TypeError, ValueError):
            self.inner.param_groups.pop()
            raise
        self.connect()

    def __repr__(self) -> str:
        return f"Averaged({self.inner!r}, workers={self.group.world_size})"

    def begin_step(self) -> None:
        """See `DistributedOptimizer`: lay out the gradients again if parameters have changed."""
        if not self.gradients.is_known or self.group.world_size == 1:
            # before the first exchange `determine_layout` compares the layouts
            self._update_layout()

    def take_step(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: the inner optimizer's step, on all ranks or on none."""
        if self.group.world_size == 1:
            # with one rank, the gradients are the means
            self.received_signals = list(self.signals)
            self._scale_own_gradients()
        else:
            flags = yield from self._exchange_gradients()
            if (yield from self.compare_algorithm()) and self._update_layout():
                # all ranks have changed the same parameters, and no gradient was written yet
                yield from self.broadcast_model_algorithm()
                flags = yield from self._exchange_gradients()
            if flags.skip_reason:
                raise SkipStep(flags.skip_reason)
            self.gradients.write(flags)
        self._inner_step()

    def _update_layout(self) -> bool:
        """Lay out the gradients again if `requires_grad` or the parameters have changed.

        Returns:
            Whether they have changed.
        """
        is_changed = self.requires_grad_flags() != self.initial_requires_grad
        if is_changed:
            self._lay_out()
        return is_changed

    def _exchange_gradients(self) -> Algorithm["GradientMeans"]:
        """Exchange the gradients, the signals and the hash bit; see `Comparison`."""
        world_size = self.group.world_size
        if not self.gradients.is_known:
            # bits of different options may be equal, so the first step compares the options
            lines = option_lines(self.param_groups, with_gpu=True)
            lines += trained_lines(self.param_groups)
            yield from self.gradients.determine_layout(self.num_common_extras, lines)
        flags = yield from self.gradients.exchange_gradients(
            self.gradient_factor(), self.common_extras()
        )
        self.receive_common([share * world_size for share in flags.shares], world_size)
        return flags

    def _scale_own_gradients(self) -> None:
        parameters = [parameter for _, parameter in self.gradients.named]
        if not have_finite_gradients(parameters, self.gradient_factor()):
            raise SkipStep("a gradient is not finite or too large")
        self.scale_gradients(parameters)

    def _inner_step(self) -> None:
        if self.clip_norm is not None:
            parameters = [p for _, p in self.gradients.named]
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        if self.momentum == "masked":
            step_on_supports(self.inner, self.gradients.supports())
        else:
            self.inner.step()
        if not self.state:
            # as with SGD: torch.distributed.checkpoint would call `step` in each `state_dict`
            super().fill_state()


@dataclass(frozen=True)
class GradientMeans:
    """The result of an exchange of gradients, the same on all ranks."""

    shares: list[float]
    """for each signal, its mean over the ranks"""
    skip_reason: str
    """why the step must be skipped: the ranks with non-finite gradients; empty if it must not"""
    present: list[list[bool]]
    """for each vector, for each of its parameters, whether any rank has a gradient"""
    sparse: list[Tensor | None]
    """the means of sparse gradients; None if no rank has one"""


class Gradients:
    """Averages the gradients of some parameters over W ranks.

    Args:
        named: names and parameters, the same on all ranks; frozen parameters are ignored.
        compress: compression of float32 and float64 gradients; None averages them uncompressed.
        worker: this rank.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        compress: Compression | None,
        worker: WorkerInfo,
    ) -> None:
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.compress, self.rank, self.world_size = compress, worker.rank, worker.world_size
        # the layout and the memory of one vector for each dtype and device
        self.layouts: list[FlatParameters] = []
        self.vectors: list[Tensor] = []
        # for each vector; None if it is exchanged uncompressed
        self.reducers: list[Reducer | None] = []
        self.loaded: Mapping[str, Mapping[str, Tensor]] = {}
        self.sparse: list[nn.Parameter] = []
        self.is_known = False

    def exchange_gradients(
        self, factor: float | Tensor, signals: Sequence[float]
    ) -> Algorithm[GradientMeans]:
        """Compute the weighted means of the gradients over the ranks, for `write`.

        The first exchange follows `determine_layout`.

        Args:
            factor: factor of this rank's gradients, whose mean over the ranks is 1; NaN makes all
                ranks skip the step.
            signals: this rank's signals; their number is equal on all ranks.
        """
        for layout, values, reducer in zip(self.layouts, self.vectors, self.reducers, strict=True):
            layout.read_gradients(values, factor)
            extra = values[layout.num_elements :]
            extra.copy_(scalars_like([*layout.have_gradients(), *signals], extra))
            if reducer is None:
                yield Mean(values)
                continue
            # the means of larger gradients are checked, but not the codes
            mark_large(values[: layout.num_elements])
            if skip_reason := (yield from reducer.mean(values, len(extra))):
                return GradientMeans([0.0] * len(signals), skip_reason, [], [])
        bad = [count_bad_elements(parameter, factor) for parameter in self.sparse]
        sparse = []
        for parameter in self.sparse:
            sparse.append((yield from mean_of_sparse(parameter, factor)))
        shares = [float(each) for each in signals]
        signal_values = torch.empty(0)
        if self.sparse and not self.vectors:
            # without dense gradients there is no vector to append the signals to
            signal_values = torch.zeros(len(shares), device=self.sparse[0].device)
            signal_values.copy_(scalars_like(shares, signal_values))
            yield Mean(signal_values)
        extras, signal_means, is_finite = self._read(signal_values, sparse)
        skip_reason = ""
        if not is_finite:
            # GradScaler may have found a gradient that was clipped later
            scale = factor if isinstance(factor, Tensor) else torch.tensor(factor)
            dense = [parameter for layout in self.layouts for parameter in layout.parameters]
            bad += [count_bad_elements(parameter, factor) for parameter in dense]
            *found, (is_skipped,) = read_scalars(*bad, scale.isnan())
            count = int(sum(count for (count,) in found) or is_skipped)
            skip_reason = yield from _skip_reason(count)
        shares = signal_means or shares
        flags = []
        for layout, reducer, numbers in zip(self.layouts, self.reducers, extras, strict=True):
            count = len(layout.parameters)
            flags.append([each > 0 for each in numbers[:count]])
            # a reducer returns the sums of extras, and Mean their means
            among = 1 if reducer is None else self.world_size
            shares = [each / among for each in numbers[count:]]
        return GradientMeans(shares, skip_reason, flags, sparse)

    def write(self, flags: GradientMeans) -> None:
        """Write the means that `exchange_gradients` computed last into the gradients."""
        for layout, values, present in zip(self.layouts, self.vectors, flags.present, strict=True):
            layout.write_gradients(values, present)
        for parameter, mean in zip(self.sparse, flags.sparse, strict=True):
            if mean is not None:
                parameter.grad = mean

    def _read(
        self, signals: Tensor, sparse: Sequence[Tensor | None]
    ) -> tuple[list[Sequence[float]], list[float], bool]:
        """Read the results of an exchange on the host, with one synchronization for each device.

        Args:
            signals: their means, if they were exchanged separately; else empty.
            sparse: the means of sparse gradients.

        Returns:
            The extra elements of each vector, `signals`, and whether all means can be used.
        """
        # a reducer has checked its vector and read the extra elements already
        means, own_extras = [], []
        for layout, values, reducer in zip(self.layouts, self.vectors, self.reducers, strict=True):
            if reducer is None:
                means.append(values)
                own_extras.append(values[layout.num_elements :])
        means += [each.values() for each in sparse if each is not None]
        found = read_scalars(signals, *map(can_be_squared, means), *own_extras)
        flags, means_of_extras = found[1 : 1 + len(means)], iter(found[1 + len(means) :])
        extras = [
            next(means_of_extras) if each is None else each.extra_sums for each in self.reducers
        ]
        return extras, found[0], all(flag > 0 for (flag,) in flags)

    def determine_layout(self, signals: int, options: Sequence[str]) -> Algorithm[None]:
        """Determine which gradients are sparse, together with the other ranks, at the first step.

        Args:
            signals: the number of signals in every exchange.
            options: lines that must be the same on all ranks.

        Raises:
            ValueError: parameters or options differ between ranks; raised on all ranks.
        """
        lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self.named]
        yield from check_same([*lines, *options], "parameters")
        kinds = torch.tensor([gradient_layout(p) for _, p in self.named], dtype=torch.uint8)
        known = (yield AllGather(kinds)).amax(dim=0).tolist()
        dense = [pair for pair, kind in zip(self.named, known, strict=True) if kind != SPARSE]
        self.sparse = [p for (_, p), kind in zip(self.named, known, strict=True) if kind == SPARSE]
        self.layouts = [
            FlatParameters([{"params": [p for _, p in pairs]}], dtype=pairs[0][1].dtype)
            for pairs in group_by_dtype(dense)
        ]
        # a flag for each parameter, and the signals
        self.vectors = [each.zeros(len(each.parameters) + signals) for each in self.layouts]
        self.reducers = [self._reducer(layout) for layout in self.layouts]
        self.load_errors(self.loaded)
        self.loaded = {}
        self.is_known = True

    def _reducer(self, layout: FlatParameters) -> Reducer | None:
        if self.compress is None or layout.dtype not in (torch.float32, torch.float64):
            return None
        worker_info = layout.worker_info(self.rank, self.world_size)
        return self.compress.reducer(layout.num_elements, worker_info)

    def supports(self) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters whose last mean has a support, with its mask in their shape."""
        found: list[tuple[Tensor, Tensor]] = []
        for layout, reducer in zip(self.layouts, self.reducers, strict=True):
            if reducer is not None and reducer.support is not None:
                found += zip(layout.parameters, layout.views(reducer.support), strict=True)
        return found

    def errors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the compression errors by the number of the vector; none for uncompressed ones.

        Before the first step, they are the loaded ones.
        """
        if not self.is_known:
            return dict(self.loaded)
        return {
            str(number): {} if reducer is None else reducer.errors()
            for number, reducer in enumerate(self.reducers)
        }

    def check_errors(self, errors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Check the argument of `load_errors`; before the first step, without their shapes.

        Raises:
            ValueError: see `Reducer.check_errors`.
        """
        reducers = {str(n): each for n, each in enumerate(self.reducers) if each is not None}
        # reducers check their own errors, and each check synchronizes with the GPU
        for name in errors.keys() - reducers.keys():
            check_error_values(errors[name])
        for name, reducer in reducers.items():
            reducer.check_errors(errors.get(name, {}))

    def load_errors(self, errors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load a result of `errors`; before the first step, it is applied in that step."""
        self.loaded = errors
        for number, reducer in enumerate(self.reducers):
            if reducer is not None:
                reducer.load_errors(errors.get(str(number), {}))


class GradientErrors(Errors):
    """The compression errors of `Averaged.gradients`, whose reducers the first step creates."""

    owner: Averaged

    def __init__(self, owner: Averaged) -> None:
        super().__init__(owner, "gradients", Dense(), 0)

    def allocate(self, worker: WorkerInfo) -> None:
        """See `Field`; does nothing."""

    def save(self) -> dict[str, Mapping[str, Tensor]]:
        """See `Errors`."""
        return self.owner.gradients.errors()

    def check(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        self.owner.gradients.check_errors(values["errors"])

    def load(self, values: Values, worker: WorkerInfo) -> None:
        """See `Field`."""
        self.owner.gradients.load_errors(values["errors"])


def _skip_reason(bad: int) -> Algorithm[str]:
    """Return why a step is skipped: the ranks' numbers of non-finite or too large elements."""
    found = yield AllGatherScalar(bad)
    words = [f"rank {rank} has {count:,}" for rank, count in enumerate(found) if count]
    if not words:
        return "the mean of the gradients overflows"
    return f"elements of the gradient that are not finite or too large: {', '.join(words)}"
