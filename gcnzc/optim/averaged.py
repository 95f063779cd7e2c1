"""Synchronous data parallelism: average the gradients of all ranks in every step.

    g <- mean of w_i g_i over the ranks, compressed if wanted
    x <- InnerOpt(x, g)

The weight w_i is the optimizer's attribute `weight`, which is 1 on all ranks by default. If a rank
sets it to its batch size divided by the mean batch size over the ranks, a step equals that of one
rank on all minibatches. The averaged vector also has a flag for each parameter, whether it has a
gradient, and signals such as a request to stop.

Notation: W ranks, P parameters.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense, Reducer, WorkerInfo
from gcnzc.compress.reducer import describe_non_finite
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, AllGather, AllGatherScalar, AllToAll, Mean
from gcnzc.exchange.sync import check_same, group_by_dtype
from gcnzc.kernels.finite import can_be_squared, mark_large
from gcnzc.optim.finite_gradients import count_bad_elements, have_finite_gradients
from gcnzc.optim.flat import FlatParameters, to_device
from gcnzc.optim.group_options import option_lines, trained_lines
from gcnzc.optim.method import SkipStep
from gcnzc.optim.options import option
from gcnzc.optim.resize import GROUPS, check_state_dict, find_holder
from gcnzc.optim.state import Errors, Field, Inner, View, check_inner_state
from gcnzc.optim.validation import check_above_zero
from gcnzc.optim.wrapping import WrappingOptimizer
from gcnzc.system.arguments import check_choice
from gcnzc.system.scalars import read_scalars, scalars_like

# layouts of gradients
NONE, DENSE, SPARSE = 0, 1, 2


@dataclass(eq=False)
class GradientVector:
    """The gradients of the parameters of one dtype and device, and how they are averaged."""

    layout: FlatParameters | None
    """None for extras only"""
    values: Tensor
    """the gradients, a flag for each parameter, and the common extras"""
    reducer: Reducer | None
    """None for no compression"""
    present: Sequence[bool] = ()
    """for each parameter, whether any rank had a gradient in the last exchange"""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters."""
        return [] if self.layout is None else self.layout.parameters

    @property
    def num_elements(self) -> int:
        """The number of elements of the gradients."""
        return 0 if self.layout is None else self.layout.num_elements


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
        compress: compression of float32 and float64 gradients; None averages them uncompressed.
            With a compression that has error feedback, such as `Sign`, each rank adds its
            compression error to its next gradient.
        clip_norm: the maximum norm of the mean gradient over all parameters; None does not clip.
        momentum: with "masked", a step changes parameters and their state, such as momentum, only
            at the elements that the ranks have sent (`Reducer.support`), also by weight decay; with
            "everywhere", at all elements. None is "masked" for sparse compressions with error
            feedback, whose training may diverge with "everywhere", and "everywhere" for others.
        options: see `DistributedOptimizer`.

    Raises:
        TypeError: the inner optimizer communicates itself or needs a closure, or a parameter is
            sharded, complex, or of a dtype that cannot be averaged.
        ValueError: an option is out of range.
    """

    compress: Compression | None = option(None, check_compression)
    clip_norm: float | None = option(None, check_above_zero)
    momentum: str = option(None, partial(check_choice, choices=("everywhere", "masked")))

    may_share = True
    """whether the state is the same on all ranks without compression"""
    vectors: list[GradientVector]
    """empty before the first exchange"""
    sparse: list[nn.Parameter]
    """the parameters with sparse gradients"""
    sparse_means: list[Tensor | None]
    """their means in the last exchange; None if no rank had a gradient"""
    shares: list[float]
    """for each common extra, its mean over the ranks in the last exchange"""
    loaded_errors: Mapping[str, Mapping[str, Tensor]]
    """compression errors for the reducers of the first exchange"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        compress = self.compress
        self.momentum = self.momentum or (compress.momentum if compress else "everywhere")
        self.is_shared = compress is None and self.may_share
        self.broadcast_names: set[str] = set()
        """names of the tensors that were broadcast; tensors of a copy have other ids"""

    def start(self) -> None:
        """See `DistributedOptimizer`."""
        self.follow_inner()
        self._lay_out()
        self.connect()

    def fill_state(self) -> None:
        """See `DistributedOptimizer`; a state that all ranks share is the inner optimizer's."""
        if not self.is_shared:
            super().fill_state()

    def _lay_out(self) -> None:
        """Prepare the exchange of the current parameters, by their `requires_grad`."""
        for group in self.param_groups:
            self.check_param_group(group)
        self.record_parameters()
        self.vectors, self.sparse, self.reducers, self.loaded_errors = [], [], {}, {}
        self.declared = self._declare_state()
        # parameters may have been added
        self.is_broadcast = False

    def _update_layout(self) -> bool:
        """Return whether `requires_grad` or the parameters have changed, and prepare for that."""
        is_changed = self.requires_grad_flags() != self.initial_requires_grad
        if is_changed:
            self._lay_out()
        return is_changed

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; call it on all ranks before the same step."""
        if not hasattr(self, "declared"):
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

    def layout_lines(self) -> list[str]:
        """See `DistributedOptimizer`; the first step compares options of parameter groups."""
        return self.setting_lines()

    def tensors_to_broadcast(self) -> list[tuple[str, Tensor]]:
        """See `DistributedOptimizer`: those that were not broadcast before."""
        tensors = super().tensors_to_broadcast()
        return [pair for pair in tensors if pair[0] not in self.broadcast_names]

    def on_broadcast(self) -> None:
        """See `DistributedOptimizer`."""
        self.broadcast_names |= {name for name, _ in super().tensors_to_broadcast()}

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained now."""
        return [each for each in self.all_parameters() if each.requires_grad]

    # --- steps

    def begin_step(self) -> None:
        """See `DistributedOptimizer`: prepare the exchange again if parameters have changed."""
        if not self.vectors or self.group.world_size == 1:
            # before the first exchange `_determine_layout` compares the layouts
            self._update_layout()

    def take_step(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: the inner optimizer's step, on all ranks or on none."""
        if self.group.world_size == 1:
            # with one rank, the gradients are the means
            self.received_signals = list(self.signals)
            if not have_finite_gradients(self.trained, self.gradient_factor()):
                raise SkipStep("a gradient is not finite or too large")
            self.scale_gradients(self.trained)
        else:
            reason = yield from self._exchange_gradients()
            if (yield from self.compare_algorithm()) and self._update_layout():
                # all ranks have changed the same parameters, and no gradient was written yet
                yield from self.broadcast_model_algorithm()
                reason = yield from self._exchange_gradients()
            if reason:
                raise SkipStep(reason)
            self._write_gradients()
        self._inner_step()

    def _inner_step(self) -> None:
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trained, self.clip_norm)
        supports: list[tuple[Tensor, Tensor]] = []
        for each in self.vectors if self.momentum == "masked" else ():
            if each.layout and each.reducer and each.reducer.support is not None:
                masks = each.layout.views(each.reducer.support)
                supports += zip(each.parameters, masks, strict=True)
        if supports:
            step_on_supports(self.inner, supports)
        else:
            self.inner.step()
        if not self.state:
            # as with SGD: torch.distributed.checkpoint would call `step` in each `state_dict`
            super().fill_state()

    def _exchange_gradients(self) -> Algorithm[str]:
        """Compute the weighted means of the gradients over the ranks, and send the signals.

        Returns:
            Why the step must be skipped, the same on all ranks; empty if it must not.
        """
        if not self.vectors:
            yield from self._determine_layout()
        is_single = len(self.vectors) + len(self.sparse) == 1
        before = {} if is_single else deepcopy(self.errors())
        reason = yield from self._compute_means()
        for name, errors in before.items() if reason else ():
            # a vector that is not finite may follow others whose means have updated their errors
            self.reducers[name].load_errors(errors)
        return reason

    def errors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the compression errors of all reducers; the tensors are not copies."""
        return {name: reducer.errors() for name, reducer in self.reducers.items()}

    def _compute_means(self) -> Algorithm[str]:
        factor, extras = self.gradient_factor(), self.common_extras()
        for vector in self.vectors:
            values, count = vector.values, vector.num_elements
            flags: list[float] = []
            if vector.layout is not None:
                vector.layout.read_gradients(values, factor)
                flags += vector.layout.have_gradients()
            values[count:] = scalars_like([*flags, *extras], values)
            if vector.reducer is None:
                yield Mean(values)
                continue
            # the means of larger gradients are checked, but not the codes
            mark_large(values[:count])
            if reason := (yield from vector.reducer.mean(values, len(values) - count)):
                self.shares = [0.0] * len(extras)
                self.receive_common(self.shares)
                return reason
        self.sparse_means = []
        for parameter in self.sparse:
            self.sparse_means.append((yield from mean_of_sparse(parameter, factor)))
        # one read of each device; a reducer has checked its vector and read the extras already
        uncompressed = [each for each in self.vectors if each.reducer is None]
        means = [each.values for each in uncompressed]
        means += [each.values() for each in self.sparse_means if each is not None]
        found = read_scalars(
            *map(can_be_squared, means),
            *(each.values[each.num_elements :] for each in uncompressed),
        )
        numbers, reason = iter(found[len(means) :]), ""
        if not all(flag > 0 for (flag,) in found[: len(means)]):
            reason = yield from self._find_bad_elements(factor)
        for vector in self.vectors:
            # a reducer returns the sums of extras, and Mean their means
            own = next(numbers) if vector.reducer is None else vector.reducer.extra_sums
            among = 1 if vector.reducer is None else self.group.world_size
            count = len(vector.parameters)
            vector.present = [each > 0 for each in own[:count]]
            self.shares = [each / among for each in own[count:]]
        self.receive_common([share * self.group.world_size for share in self.shares])
        return reason

    def _find_bad_elements(self, factor: float | Tensor) -> Algorithm[str]:
        """Return why a step is skipped: the ranks' numbers of non-finite or too large elements."""
        # GradScaler may have found a gradient that was clipped later
        is_bad = (factor if isinstance(factor, Tensor) else torch.tensor(factor)).isnan()
        counts = [count_bad_elements(parameter, factor) for parameter in self.trained]
        *own, (is_skipped,) = read_scalars(*counts, is_bad)
        found = yield AllGatherScalar(int(sum(count for (count,) in own) or is_skipped))
        return describe_non_finite(found)

    def _write_gradients(self) -> None:
        for vector in self.vectors:
            if vector.layout is not None:
                vector.layout.write_gradients(vector.values, vector.present)
        for parameter, mean in zip(self.sparse, self.sparse_means, strict=True):
            if mean is not None:
                parameter.grad = mean

    def _determine_layout(self) -> Algorithm[None]:
        """Determine which gradients are sparse, together with the other ranks, at the first step.

        Raises:
            ValueError: parameters or options differ between ranks; raised on all ranks.
        """
        named = [pair for pair in self.named_parameters() if pair[1].requires_grad]
        lines = [f"{name}\t{tuple(each.shape)} {each.dtype}" for name, each in named]
        # bits of different options may be equal, so the first step compares the options
        lines += option_lines(self.param_groups, with_gpu=True)
        yield from check_same([*lines, *trained_lines(self.param_groups)])
        kinds = torch.tensor([gradient_layout(each) for _, each in named], dtype=torch.uint8)
        known = (yield AllGather(kinds)).amax(dim=0).tolist()
        dense = [pair for pair, kind in zip(named, known, strict=True) if kind != SPARSE]
        self.sparse = [each for (_, each), kind in zip(named, known, strict=True) if kind == SPARSE]
        for number, pairs in enumerate(group_by_dtype(dense)):
            parameters = [each for _, each in pairs]
            layout = FlatParameters([{"params": parameters}], dtype=parameters[0].dtype)
            worker = layout.worker_info(self.group.rank, self.group.world_size)
            if self.compress is not None and layout.dtype in (torch.float32, torch.float64):
                reducer = self.compress.reducer(layout.num_elements, worker)
                reducer.load_errors(self.loaded_errors.get(str(number), {}))
                self.reducers[str(number)] = reducer
            values = layout.zeros(len(layout.parameters) + self.num_common_extras)
            self.vectors.append(GradientVector(layout, values, self.reducers.get(str(number))))
        if not self.vectors:
            values = torch.zeros(self.num_common_extras, device=self.describe_worker().device)
            self.vectors = [GradientVector(None, values, None)]
        self.loaded_errors = {}

    # --- the state

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        errors = GradientErrors(owner=self, name="gradients", compress=Dense(), size=0)
        return [*super().declare(), Inner(owner=self), errors]

    def state_layout(self) -> list[str]:
        """See `DistributedOptimizer`: shapes; and frozen parameters, which have no errors."""
        has_errors = self.compress is not None
        return [
            f"parameter {n} {tuple(p.shape)}{', frozen' * (has_errors and not p.requires_grad)}"
            for n, p in enumerate(self.all_parameters())
        ]

    def describe_worker(self) -> WorkerInfo:
        """See `DistributedOptimizer`; the gradients may be of several dtypes."""
        device = self.all_parameters()[0].device
        return WorkerInfo(self.group.rank, self.group.world_size, device, torch.float32)

    def snapshot(self) -> dict[str, Any]:
        """See `DistributedOptimizer`.

        Without compression, it is the same on all ranks: the inner optimizer's state dict with
        counts of steps in its first parameter group. The inner optimizer itself loads it too, since
        torch's optimizers accept further options of a group. torch.distributed.checkpoint saves the
        options of groups, but no other entries.
        """
        if not self.is_shared:
            return super().snapshot()
        state = self.inner.state_dict()
        first, *others = state[GROUPS]
        counts = {"gcnzc_steps": self.steps, "gcnzc_skipped": self.skipped}
        return {**state, GROUPS: [{**first, **counts}, *others]}

    def state_dict(self) -> dict[str, Any]:
        """Return the state; see `snapshot`."""
        return self.snapshot() if self.is_shared else super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; without compression, a state dict of the inner optimizer."""
        if not self.is_shared:
            # parameters may have been frozen or unfrozen since the last step
            self._update_layout()
            super().load_state_dict(state_dict)
            return
        check_state_dict(state_dict)
        if "rank" in state_dict or find_holder(state_dict):
            raise ValueError(
                "the state of an optimizer whose ranks have different states, not of the inner "
                "optimizer\n\nhint: load it into an optimizer with the same options, such as "
                "`compress`"
            )
        check_inner_state(self.inner, state_dict)
        groups = [dict(group) for group in state_dict[GROUPS]]
        steps, skipped = (groups[0].pop(f"gcnzc_{name}", None) for name in ("steps", "skipped"))
        self.check_loaded_options(groups)
        self.inner.load_state_dict({**state_dict, GROUPS: groups})
        # a state of the inner optimizer has no counts, and one of SGD counts no steps
        taken = [int(each["step"]) for each in self.inner.state.values() if "step" in each]
        self.steps = max(taken, default=self.steps) if steps is None else steps
        self.skipped = self.skipped if skipped is None else skipped
        self.finish_load(self.inner.param_groups, {})

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        self.on_broadcast()


class GradientErrors(Errors):
    """The compression errors of `Averaged`, whose reducers the first exchange creates."""

    owner: Averaged

    def allocate(self, worker: WorkerInfo) -> None:
        """See `Field`; does nothing."""

    def save(self) -> dict[str, Mapping[str, Tensor]]:
        """See `Errors`; the loaded ones before the first exchange."""
        owner = self.owner
        if not owner.vectors:
            return dict(owner.loaded_errors)
        return owner.errors()

    def read(self, saved: Mapping[str, Any], own: View, worker: WorkerInfo) -> Any:
        """See `Field`."""
        for name, reducer in self.owner.reducers.items():
            reducer.check_errors(saved["errors"].get(name, {}))
        return saved["errors"]

    def load(self, value: Any, worker: WorkerInfo) -> None:
        """See `Field`."""
        self.owner.loaded_errors = value
        for name, reducer in self.owner.reducers.items():
            reducer.load_errors(value.get(name, {}))


@torch.no_grad()
def step_on_supports(inner: Optimizer, supports: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Take an optimizer's step, and undo it at the elements that are not in a support.

    With a sparse compression and error feedback, each element of the mean gradient is 0 in most
    steps. When the element is sent, it is the sum of its gradients since it was last sent.
    Heavy-ball momentum would apply that sum again in the following steps, without new gradients
    that correct it. Here an element's momentum is updated as often as its gradient.

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


def gradient_layout(parameter: nn.Parameter) -> int:
    """Return the layout of a parameter's gradient: `NONE`, `DENSE` or `SPARSE`."""
    if parameter.grad is None:
        return NONE
    return SPARSE if parameter.grad.is_sparse else DENSE


def mean_of_sparse(parameter: nn.Parameter, factor: float | Tensor) -> Algorithm[Tensor | None]:
    """Return the weighted mean of a sparse gradient over the ranks; None if no rank has one.

    It is a coalesced sparse tensor with the rows of all ranks.
    """
    gradient, columns = parameter.grad, parameter.shape[1:]
    rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *columns)
    if gradient is not None:
        gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        rows = gradient.indices()[0]
        values = gradient.values() * to_device(factor, parameter.device)
    counts = yield AllGatherScalar(len(rows))
    if not sum(counts):
        return None
    sizes = [count * columns.numel() for count in counts]
    all_rows = yield AllToAll([rows] * len(counts), counts)
    all_values = yield AllToAll([values.reshape(-1)] * len(counts), sizes)
    return torch.sparse_coo_tensor(
        torch.cat(all_rows)[None],
        torch.cat(all_values).view(-1, *columns) / len(counts),
        parameter.shape,
        check_invariants=False,
    ).coalesce()
