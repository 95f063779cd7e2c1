"""The base classes of optimizers whose `step` communicates with the other ranks.

What all of them do is here, so that a method has only its algorithm: broadcast rank 0's parameters
at the start, send signals and compare options inside the exchanges, skip a step on all ranks,
support GradScaler, save and load the declared state, and make the replicas equal at the end.

Extras are numbers that are appended to an exchanged vector. The common extras, which all methods
send, are a number that shows whether the ranks differ (see `Comparison.bit`), and the signals,
which are flags such as a request to stop.
"""

import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gcnzc.compress import Reducer, WorkerInfo
from gcnzc.exchange import Algorithm, Caller, Group, RequestMismatch, WorkerLost, current_group, run
from gcnzc.exchange.engine import identify_caller
from gcnzc.exchange.sync import (
    broadcast,
    check_same,
    dense_buffers,
    describe_layout,
    synchronize_buffers,
)
from gcnzc.optim.checksums import Checksums
from gcnzc.optim.ddp import check_no_average, find_ddp
from gcnzc.optim.defaults import LATE_SHARE, LATE_STEPS
from gcnzc.optim.finite_gradients import report_overflow
from gcnzc.optim.flat import FlatParameters
from gcnzc.optim.fully_shard import find_peers, local, shard_name
from gcnzc.optim.group_options import (
    CALL,
    OPTIMIZER,
    Comparison,
    find_difference_by_store,
    option_key,
    option_lines,
)
from gcnzc.optim.options import declared_options, option, set_options, signature_of
from gcnzc.optim.resize import (
    GROUPS,
    check_state_dict_options,
    number_groups,
    pack_state,
    unpack_state,
)
from gcnzc.optim.state import (
    Field,
    State,
    check_group_lengths,
    declared_fields,
    scalar,
)
from gcnzc.optim.validation import (
    check_at_least_zero,
    check_count,
    check_group,
    check_module,
    check_options,
    check_parameters,
)
from gcnzc.system.arguments import check_flag

T = TypeVar("T")

NO_PARAMETER = ("no such parameter", "no such parameter")


class LatePhaseWarning(UserWarning):
    """A phase of an optimizer, such as compression or local steps, begins late in the run or never.

    Rank 0 warns. `warnings.simplefilter("ignore", gcnzc.optim.LatePhaseWarning)` silences it.
    """


class SkipStep(Exception):
    """Raised on all ranks by an exchange that must not be used; its text is the reason."""


class CommunicatingOptimizer(Optimizer):
    """The base class of optimizers of torch whose `step` communicates with the other ranks.

    The communication is an `Algorithm`, a generator of requests, such as collectives. `step` runs
    it with torch.distributed; `gcnzc.exchange.lockstep` runs the algorithms of all ranks in one
    process, as a simulation.
    """

    group: Group
    """the ranks that communicate"""
    identity: str
    """`name`, and the number of this optimizer among those of `group`; copies have the same"""
    checked_options = ""
    """the `option_key` of options that were checked; empty to check them in each step"""
    _weight = 1.0

    @property
    def name(self) -> str:
        """The name of the type of optimizer, in messages, states and headers of requests."""
        return type(self).__name__

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients in means and in local steps.

        `step` does not reset it. If batch sizes differ between ranks, set it before each `step` to
        this rank's number of samples divided by the mean number over the ranks. The mean of the
        weights should be 1, because means divide by the number of ranks. Means of parameters are
        not weighted.

        Raises:
            ValueError: it is set to anything but a finite number of at least 0.
        """
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        check_at_least_zero("weight", value)
        self._weight = float(value)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take an optimizer step, and communicate with the other ranks if an exchange is due.

        Args:
            closure: evaluates the model again and returns the loss; called once if given.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            WorkerLost: another rank did not respond in time, or its process has ended.
            ValueError: one of

                - Options, numbers of steps, loaded states, parameters or tables differ between
                  ranks; raised on all ranks. Each exchange of a `DistributedOptimizer` detects a
                  difference with a probability of 1/2. Its next exchange always detects different
                  `requires_grad`, and states of different steps, or loaded on some ranks only;
                  states of the same step are not compared. Options in GPU tensors are compared in
                  every 100th exchange only. Checksums of the parameters that must be equal are
                  computed about every 100 exchanges. A `RowOptimizer` compares options and numbers
                  of steps in each step, and some rows before the first step.
                - An option of a parameter group is out of its range; raised by this rank before it
                  communicates.
                - The step failed, and the shape, dtype or device of a parameter has changed; raised
                  by this rank only.
                - DistributedDataParallel has averaged the gradients; see `keep_gradients_local`.
            RequestMismatch: the ranks' collectives or messages differ; raised on all ranks.
            IndexError: a gather of rows on a GPU used an id outside the table.
        """
        key = option_key(self.param_groups)
        if not key or key != self.checked_options:
            # a scheduler, or the caller, has changed them
            for number, group in enumerate(self.param_groups):
                where = f" of parameter group {number}"
                check_options(group, self.defaults, where, with_gpu=False)
            self.checked_options = key
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.communicate()
        return loss

    def communicate(self) -> None:
        """Run `algorithm`; `step` calls it."""
        run(self.algorithm(), self.group)

    @abstractmethod
    def algorithm(self) -> Algorithm[None]:
        """Return the communication and computation of `step`, which `step` and `lockstep` run."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled.

        These are all except hooks, and the wrapper that a scheduler puts around `step`. A copy
        communicates through the same group. Before unpickling an optimizer of several ranks,
        initialize torch.distributed with the same ranks; otherwise the first `step` that exchanges
        raises a RuntimeError.
        """
        return {
            name: value
            for name, value in vars(self).items()
            if name != "step" and not name.startswith(("_optimizer_", "_zero_grad"))
        }


class DistributedOptimizer(CommunicatingOptimizer):
    """The base class of optimizers that average the gradients or parameters of a model.

    A subclass declares its options (`gcnzc.optim.options`) and its state (`gcnzc.optim.state`), and
    implements `take_step`.

    Args:
        params: an iterable of parameters or parameter groups, as for torch's optimizers.
        defaults: default options of the parameter groups.
        group: the ranks that communicate; those of torch.distributed's default process group if
            None.
        signals: the number of flags, such as a request to stop, that each exchange combines over
            the ranks by a logical or.
        options: the options of the class, and

            - `module`: the model. If given, its dense buffers and its parameters that are not in
              `params` are also broadcast from rank 0 at the start, and `finalize` makes these
              buffers equal.
            - `total_steps`: the number of steps of the run; None if it is not known.

    Raises:
        TypeError: a parameter is sharded, complex, or of a dtype that cannot be averaged.
        ValueError: parameters or options differ between ranks, which is raised on all of them, or
            an option is out of range.
    """

    module: nn.Module | None = option(None, is_compared=False)
    total_steps: int | None = option(None, partial(check_count, least=1), is_compared=False)

    __signature__: ClassVar[inspect.Signature]

    is_shared = False
    """whether the state is the same on all ranks, so that rank 0's checkpoint is sufficient"""

    is_replicated = True
    """whether checksums of trained parameters are compared between ranks; not by local methods"""

    accepts_shards = False
    """whether parameters may be sharded by `fully_shard`"""

    accepts_ddp = True
    """whether DistributedDataParallel with `keep_gradients_local` may wrap the model"""

    late_phase_remedy = (
        "a shorter warm-up (`warmup`, of gcnzc train --optimizer NAME:warmup=N) lets it begin "
        "sooner"
    )
    """how to let the phase of `late_phase` begin sooner"""

    # with this flag GradScaler neither unscales gradients nor skips steps; `step` does both
    _step_supports_amp_scaling = True

    grad_scale: Tensor | None
    """the scale of the gradients, set by GradScaler during `step`; None if already unscaled"""
    found_inf: Tensor
    """set by GradScaler during `step`: above 0 if it found a gradient that is not finite"""
    steps: int = scalar()
    """number of steps taken, equal on all ranks; only local methods count skipped steps"""
    skipped: int = scalar(kind="local", resize="mean")
    """number of steps that were skipped because a gradient was not finite or too large"""
    declared: State
    flat: FlatParameters
    # objects of `find_ddp` in the first step, and what `check_no_average` returned for them
    _ddps: WeakKeyDictionary[DistributedDataParallel, list[int] | None] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = signature_of(cls)

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        group: Group | None = None,
        *,
        signals: int = 0,
        **options: Any,
    ) -> None:
        if group is not None:
            check_group(group)
        check_count("signals", signals)
        set_options(self, options)
        super().__init__(params, defaults)
        if self.module is not None:
            check_module(self.module, self.param_groups)
        self.group = find_peers(current_group(), self.all_parameters()) if group is None else group
        self._signals = [False] * signals
        self.received_signals = [False] * signals
        """for each signal, whether any rank sent it in the exchanges that finished in the last
        `step`; all False if none of them had signals. An overlapped exchange finishes in a later
        step than the one that started it. A single rank receives its own signals. A skipped step
        may discard signals, so send them until they are received."""
        self.num_common_extras = 1 + signals
        """the length of `common_extras`"""
        self.identity = self.name
        self.comparison, self.checksums = Comparison(), Checksums()
        self.reducers: dict[str, Reducer] = {}
        """compute compressed means; created by the fields `Errors` of `declare`"""
        self.is_broadcast = False
        """whether the model was broadcast, or a state was loaded instead; `Averaged` resets it when
        parameters are added or their `requires_grad` changes"""
        self.skip_reason = ""
        """why the last `step`, or a part of it, was skipped, or why a mean excludes ranks; empty if
        nothing was skipped or excluded"""
        self.configure()
        self.start()

    def configure(self) -> None:
        """Check options that depend on each other or on the group, and derive attributes."""

    def start(self) -> None:
        """Lay out the parameters, allocate the state, and broadcast the model."""
        self.fill_state()
        self.flat = self.lay_out()
        self.record_parameters()
        self.declared = self._declare_state()
        self.connect()

    def __repr__(self) -> str:
        return f"{self.describe_options()}, workers={self.group.world_size}"

    # --- what a method implements

    def lay_out(self) -> FlatParameters:
        """Return the layout of the flat vector."""
        return FlatParameters(self.param_groups)

    def declare(self) -> list[Field]:
        """Return the fields of the state: those of the class, and others that subclasses append."""
        return declared_fields(self)

    @abstractmethod
    def take_step(self) -> Algorithm[Any]:
        """Exchange and update the parameters.

        Raises:
            SkipStep: all ranks skip the step; raised before any state has changed.
        """

    def compared_options(self) -> dict[str, Any]:
        """Return the options, by name, that must be equal on all ranks; others may be added."""
        options = declared_options(type(self)).items()
        return {
            each.name or name: getattr(self, name) for name, each in options if each.is_compared
        }

    def describe_options(self) -> str:
        """Return the `compared_options` as text."""
        pairs = (f"{name}={text}" for name, text in self.option_texts().items())
        return f"{self.name}({', '.join(pairs)})"

    def option_texts(self) -> dict[str, str]:
        """Return the `compared_options` as texts of one line each, sorted by their names."""
        # functions are equal on all ranks if their names are
        return {
            name: " ".join(str(getattr(value, "__qualname__", value)).split())
            for name, value in sorted(self.compared_options().items())
        }

    def on_broadcast(self) -> None:
        """Initialize the state that depends on the parameters, which are equal on all ranks now."""

    def on_load(self) -> None:
        """Update what is derived from the state, after it was loaded."""

    def finish(self) -> Algorithm[str]:
        """Make the parameters equal on all ranks, and return why that failed, or an empty string.

        The result is the same on all ranks. Does nothing by default.
        """
        return ""
        yield  # makes this a generator

    # --- what a training loop asks for; without an effect by default

    needs_closure = False
    """whether `step` calls a closure that computes the gradients, several times"""
    weighs_by_size = False
    """whether a step divides by the sizes that `micro_batches` is given, instead of `weight`"""

    def micro_batches(self, batches: Iterable[T], sizes: Sequence[float] = ()) -> Iterable[T]:
        """Return the micro-batches of a step; see `DropCompute`."""
        return batches

    def backward(self, loss: Tensor) -> bool:
        """Add the gradients of a micro-batch; return False if it is dropped instead."""
        loss.backward()
        return True

    def pause_exchanges(self) -> None:
        """Stop exchanges with ranks that may still take steps; see `LocalMethod`."""

    def resume_exchanges(self) -> None:
        """Continue after `pause_exchanges`."""

    def late_phase(self) -> str:
        """Return the name of a phase, such as compression, that has not begun; empty if none."""
        return ""

    # --- what this rank adds to exchanges besides gradients or parameters

    @property
    def signals(self) -> list[bool]:
        """This rank's flags for the next exchange, such as a request to stop.

        Raises:
            TypeError: they are set to anything but a list of flags.
            ValueError: they are set to another number of flags than the constructor got.
        """
        return self._signals

    @signals.setter
    def signals(self, values: Sequence[bool]) -> None:
        if len(values) != len(self.received_signals):
            raise ValueError(
                f"signals is {values}, but the optimizer was constructed with "
                f"signals={len(self.received_signals)}\n\nhint: give the constructor "
                f"signals={len(values)} on all ranks"
            )
        self._signals = [check_flag(f"signals[{index}]", each) for index, each in enumerate(values)]

    def gradient_factor(self) -> float | Tensor:
        """Return the factor of this rank's gradients: its weight divided by GradScaler's scale.

        With GradScaler it is a tensor () of float64 on the device of the scale; NaN if GradScaler
        found a gradient that is not finite, even if it was clipped later.
        """
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None:
            return self._weight
        if not isinstance(found_inf, Tensor):
            # GradScaler sets the number 0 on a rank without gradients
            found_inf = torch.zeros((), device=None if scale is None else scale.device)
        scale = torch.ones_like(found_inf) if scale is None else scale
        factor: Tensor = self._weight / scale.double()
        return factor.masked_fill(found_inf.to(factor.device) > 0, torch.nan)

    def scale_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Multiply gradients in place by this rank's weight divided by GradScaler's scale."""
        scale = getattr(self, "grad_scale", None)
        factor: float | Tensor = self._weight
        if scale is not None:
            # a scale on a GPU is not read, because reading it synchronizes with the GPU
            factor = self._weight / (float(scale) if scale.device.type == "cpu" else scale.double())
        is_needed = isinstance(factor, Tensor) or factor != 1.0
        for parameter in parameters if is_needed else ():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    # --- steps

    def communicate(self) -> None:
        """Run `algorithm` after the checks of a step; `step` calls it."""
        self.group.count_step(self.steps)
        self.check_ddp()
        ignored = self.num_ignored_gradients
        self._run(self.algorithm(), "step()")
        if self.num_ignored_gradients > ignored and hasattr(self, "found_inf"):
            report_overflow(self)

    @property
    def num_ignored_gradients(self) -> int:
        """The number of steps that ignored gradients, of which one was not finite or too large."""
        return self.skipped

    def _run(self, algorithm: Algorithm[T], call: str) -> T:
        """Run the algorithm of a call; if the ranks' requests do not match, report what differs."""
        try:
            return run(algorithm, self.group)
        except RequestMismatch as error:
            # last, since any other difference explains more
            lines = [*self.compared_lines(), f"{CALL}\t{call}"]
            difference = find_difference_by_store(lines, self.group)
            if not difference:
                raise
            raise RequestMismatch(difference) from error

    def algorithm(self) -> Algorithm[None]:
        """Return the communication and computation of `step`, which `step` and `lockstep` run."""
        # as `identify_caller` does, but without a generator between this one and its driver
        caller_before = yield Caller(self.identity)
        if [each.dtype for each in self.all_parameters()] != self.initial_dtypes:
            self.check_unchanged()
        self.begin_step()
        if not self.is_broadcast:
            yield from self.broadcast_model_algorithm()
        self.skip_reason, self.received_signals = "", [False] * len(self.received_signals)
        try:
            yield from self.take_step()
        except SkipStep as skip:
            self.skip_reason = str(skip)
            self.skipped += 1
        except RuntimeError as error:
            if not isinstance(error, RequestMismatch | WorkerLost):
                self.check_unchanged()
            raise
        else:
            self.steps += 1
            self.warn_of_late_phase()
        if self.comparison.is_due and (yield from self.compare_algorithm()):
            self.check_trainable()
        yield Caller(caller_before)

    def begin_step(self) -> None:
        """Check that a single rank has the parameters of the construction; see `algorithm`."""
        if self.group.world_size == 1:
            self.check_trainable()

    def warn_of_late_phase(self) -> None:
        """Warn on rank 0 in the middle of the run if a phase has not begun."""
        total = self.total_steps
        if self.steps != (LATE_STEPS if total is None else max(1, round(LATE_SHARE * total))):
            return
        if self.group.rank == 0 and self.group.world_size > 1 and (phase := self.late_phase()):
            length = "" if total is None else f" of {total}"
            warnings.warn(
                f"{self.name}: no {phase} in the first {self.steps} steps{length}\n\n"
                f"hint: {self.late_phase_remedy}",
                LatePhaseWarning,
                stacklevel=2,
            )

    # --- extras of exchanges, and comparisons between the ranks

    def common_extras(self) -> list[float]:
        """Return the common extras: the hash bit or a request to compare, and the signals."""
        # their elements may have been set in place
        self.signals = self._signals
        if self.group.world_size == 1:
            # there is no other rank to compare with
            return [0.0, *self._signals]
        if self.comparison.received >= self.checksums.next_update:
            self.checksums.update(self.comparison.received, self.replicated_parameters)
        if self.requires_grad_flags() != self.initial_requires_grad:
            self.comparison.is_requested = True
        lines = self.comparison.state_lines(self.identity, self.steps)
        bit = self.comparison.bit(self.param_groups, [*lines, self.checksums.line])
        return [bit, *self._signals]

    def receive_common(self, sums: Sequence[float]) -> None:
        """Update the comparison and the received signals.

        Args:
            sums: the sums of the extras over the ranks, which begin with the common ones.
        """
        self.comparison.receive(sums[0], self.group.world_size)
        # others may follow
        signals = sums[1 : 1 + len(self.received_signals)]
        self.received_signals = [
            was or round(each) > 0 for was, each in zip(self.received_signals, signals, strict=True)
        ]

    def compared_lines(self) -> list[str]:
        """Return the lines that must be the same on all ranks; see `Comparison`."""
        return self.comparison.lines(self.identity, self.steps, self.param_groups)

    def compare_algorithm(self) -> Algorithm[bool]:
        """Compare lines and parameters of all ranks if that is due; see `Comparison.compare`."""
        is_compared = yield from self.comparison.compare(self.compared_lines)
        if is_compared:
            yield from self.checksums.check_equal(self.replicated_parameters())
        return is_compared

    def replicated_parameters(self) -> list[tuple[str, Tensor]] | None:
        """Return names and parameters that must be equal now; None if all may differ by design."""
        named = zip(self.named_parameters(), self.initial_requires_grad, strict=False)
        return [
            (name, local(each))
            for (name, each), is_trained in named
            if self.is_replicated or not (is_trained or each.requires_grad)
        ]

    # --- the parameters, and what they were when the optimizer was constructed

    def all_parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups, including frozen ones."""
        return [each for group in self.param_groups for each in group["params"]]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, named by their positions, and by their names in the model if known."""
        own = [] if self.module is None else self.module.named_parameters()
        names = {id(parameter): name for name, parameter in own}
        for number, group in enumerate(self.param_groups):
            names |= zip(map(id, group["params"]), group.get("param_names", ()), strict=False)
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                position = f"group {number}, parameter {index}"
                yield f"{position}, named {name}" if name else position, parameter

    def requires_grad_flags(self) -> list[bool]:
        """The current `requires_grad` of each parameter."""
        return [each.requires_grad for each in self.all_parameters()]

    def record_parameters(self) -> None:
        """Record `requires_grad` and the layout of the current parameters."""
        self.initial_requires_grad = self.requires_grad_flags()
        self.initial_dtypes = [each.dtype for each in self.all_parameters()]
        self._initial = self._describe_parameters()

    def _describe_parameters(self) -> dict[str, tuple[str, str]]:
        return {
            name: (
                f"requires_grad={each.requires_grad}",
                f"{tuple(each.shape)} {each.dtype} on {each.device}",
            )
            for name, each in self.named_parameters()
        }

    def check_trainable(self) -> None:
        """Check that the parameters have the same `requires_grad` as at the construction.

        With several ranks it is called after a comparison, so that all ranks raise the error.

        Raises:
            ValueError: a parameter was frozen, unfrozen, added or removed.
        """
        if self.requires_grad_flags() != self.initial_requires_grad:
            self.check_unchanged()

    def check_unchanged(self) -> None:
        """Check that the parameters are those of the construction, but for their values.

        It would take time in each step, so it is called only if `requires_grad` or a dtype has
        changed, as by `model.half()`, or after an error.

        Raises:
            ValueError: `requires_grad`, shape, dtype or device of a parameter has changed.
        """
        before, now = self._initial, self._describe_parameters()
        for name in {**now, **before}:
            pairs = (each.get(name, NO_PARAMETER) for each in (now, before))
            for found, expected in zip(*pairs, strict=True):
                if found != expected:
                    raise ValueError(
                        f"{name}: {found} now, but {expected} when {self.name} was constructed"
                        "\n\nhint: change parameters on all ranks before constructing the "
                        "optimizer, and later only their values in place, as with copy_"
                    )

    def check_ddp(self) -> None:
        """Check that DistributedDataParallel has not averaged this rank's gradients.

        Raises:
            ValueError: it has, or `DropCompute` trains such a model.
        """
        if self._ddps is None:
            found = find_ddp(self.all_parameters(), self.group)
            self._ddps = WeakKeyDictionary(dict.fromkeys(found))
        for ddp, times in self._ddps.items():
            self._ddps[ddp] = check_no_average(ddp, times, self.name, accepts_hook=self.accepts_ddp)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; most methods support it only before the construction.

        Raises:
            TypeError: a parameter is sharded, complex, or of a dtype that cannot be averaged.
            ValueError: an option is out of its range, or the flat vectors are laid out already.
        """
        if hasattr(self, "flat"):
            raise ValueError(
                f"{self.name} does not support adding parameters\n\nhint: give all groups to the "
                "constructor; requires_grad may not change either"
            )
        super().add_param_group(param_group)
        self.check_param_group(self.param_groups[-1])

    def check_param_group(self, group: Mapping[str, Any]) -> None:
        """Check the parameters and options of a group; see `add_param_group`."""
        check_parameters(self.name, group["params"], accepts_shards=self.accepts_shards)
        check_options(group, self.defaults)

    # --- start and end of the run

    def connect(self) -> None:
        """Register this optimizer with the group, and broadcast the model if there is a backend."""
        if self.identity == self.name:
            self.identity = self.group.new_caller(self.identity)
        if self.group.backend:
            run(self.broadcast_model_algorithm(), self.group)

    def broadcast_model(self) -> None:
        """Broadcast the parameters and buffers of rank 0, if `is_broadcast` is False.

        `Averaged` broadcasts only tensors that were not broadcast before, such as added parameters.

        Raises:
            ValueError: shapes, dtypes or options differ between ranks; raised on all ranks.
        """
        self._run(self.broadcast_model_algorithm(), "broadcast_model()")

    @identify_caller
    def broadcast_model_algorithm(self) -> Algorithm[None]:
        """Return the communication of `broadcast_model`; see `algorithm`."""
        if self.is_broadcast:
            return
        if self.group.world_size > 1:
            tensors = self.tensors_to_broadcast()
            lines = [*self.layout_lines(), *describe_layout(tensors)]
            yield from check_same(lines)
            yield from broadcast([(name, local(tensor)) for name, tensor in tensors])
        self.is_broadcast = True
        self.on_broadcast()

    def layout_lines(self) -> list[str]:
        """Return lines for options and layouts, which `broadcast_model` compares between ranks."""
        return [
            *self.setting_lines(),
            f"number of signals\t{len(self.signals)}",
            *(
                f"line {number} of the state\t{each}"
                for number, each in enumerate(self.declared.layout)
            ),
            *option_lines(self.param_groups, with_gpu=True),
        ]

    def setting_lines(self) -> list[str]:
        """Return lines for the optimizer and the `compared_options`."""
        options = (f"{name} of {self.name}\t{text}" for name, text in self.option_texts().items())
        return [f"{OPTIMIZER}\t{self.name}", *options]

    def tensors_to_broadcast(self) -> list[tuple[str, Tensor]]:
        """The names and tensors to broadcast: all parameters, and the module's dense buffers."""
        named: list[tuple[str, Tensor]] = list(self.named_parameters())
        if self.module is not None:
            named += [*self.module.named_parameters(), *dense_buffers(self.module)]
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named:
            # the parameters of groups are among those of the module
            unique.setdefault(id(tensor), (name, tensor))
        return list(unique.values())

    def finalize(self) -> None:
        """Make parameters and dense buffers equal on all ranks; call it once, after the last step.

        Floating-point buffers of `module`, such as BatchNorm's, become their means over the ranks.

        Raises:
            ValueError: the ranks' numbers of steps, options or final parameters differ, or the last
                synchronization failed because numbers are not finite; raised on all ranks.
            RequestMismatch: such a difference makes the ranks' requests differ; raised on all.
            WorkerLost: see `step`.
        """
        self._run(self.finalize_algorithm(), "finalize()")

    @identify_caller
    def finalize_algorithm(self) -> Algorithm[None]:
        """Return the communication and computation of `finalize`; see `algorithm`."""
        yield from self.broadcast_model_algorithm()
        has_peers = self.group.world_size > 1
        if has_peers:
            # compare even if no bit has differed: since the last exchange the ranks may have taken
            # different numbers of steps
            self.comparison.is_due = True
            # the parameters are compared below, because the last synchronization may change them
            self.checksums.renew(None)
            yield from self.compare_algorithm()
        if reason := (yield from self.finish()):
            effect = ", so the ranks have different parameters" if has_peers else ""
            raise ValueError(
                f"the last synchronization failed{effect}: {reason}"
                "\n\nhint: load an earlier checkpoint, and continue with a smaller learning rate "
                "or with gradient clipping; `optimizer.skip_reason` after each step shows the "
                "first one that was skipped, and why"
            )
        if has_peers:
            named = [(name, local(each)) for name, each in self.named_parameters()]
            self.checksums.renew(named)
            yield from self.checksums.check_equal(named)
            if self.module is not None:
                yield from synchronize_buffers(self.module)

    def average_parameters(self) -> Any:
        """Set the parameters to their mean over the ranks, for an evaluation.

        Does nothing if they are in sync. All ranks call it after the same number of steps, and
        `restore_parameters` after the evaluation.

        Returns:
            The argument of `restore_parameters`.
        """
        return self._run(self.average_parameters_algorithm(), "average_parameters()")

    def average_parameters_algorithm(self) -> Algorithm[Any]:
        """Return the communication and computation of `average_parameters`; see `algorithm`."""
        return
        yield

    def restore_parameters(self, own: Any) -> None:
        """Restore this rank's parameters, without communication.

        Args:
            own: the result of `average_parameters`.
        """

    # --- the state

    def fill_state(self) -> None:
        """Add an empty entry to `state` for each parameter.

        Otherwise torch.distributed.checkpoint would call `step` to initialize the state.
        """
        for parameter in self.all_parameters():
            self.state.setdefault(parameter, {})

    def __getstate__(self) -> dict[str, Any]:
        """See `CommunicatingOptimizer`; a copy declares its state again."""
        copied = super().__getstate__().items()
        return {name: value for name, value in copied if name not in ("_ddps", "declared")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy."""
        super().__setstate__(state)
        self.declared = self._declare_state()

    def _declare_state(self) -> State:
        return State(self.name, self.declare(), self.state_layout(), self.describe_worker())

    def state_layout(self) -> list[str]:
        """Return lines that a state must have too: `is_saved` options, and parameters' shapes."""
        options = declared_options(type(self)).items()
        saved = [f"{name}={bool(getattr(self, name))}" for name, each in options if each.is_saved]
        return [*saved, *self.flat.layout()]

    def describe_worker(self) -> WorkerInfo:
        """Return what vectors of the state, and reducers, are created for."""
        return self.flat.worker_info(self.group.rank, self.group.world_size)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this rank: tensors, which are not copied, and plain values.

        `shared` is the same on all ranks; `local`, `shards` and `errors` are this rank's own.
        """
        return {**self.declared.snapshot(), GROUPS: number_groups(self.param_groups)}

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
        return pack_state(self.snapshot(), self.all_parameters())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` or `snapshot` of this rank, or a result of `resize_state`.

        Raises:
            ValueError: the state belongs to another rank, number of ranks, type of optimizer or
                model, is damaged, or has an option that is out of its range. Nothing is loaded
                then.
        """
        shard = shard_name(self.all_parameters())
        snapshot = unpack_state(self.name, state_dict, self.group.rank, shard)
        groups: Any = snapshot.get(GROUPS)
        check_group_lengths(self.param_groups, groups)
        self.check_loaded_options(groups)
        self.declared.load(snapshot)
        self.finish_load(groups, snapshot["shared"])

    def check_loaded_options(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Check the options of the parameter groups of a state, before it is loaded."""
        for number, group in enumerate(groups):
            where = f" of parameter group {number} of the state"
            check_options({**self.defaults, **group}, self.defaults, where)

    def finish_load(self, groups: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]) -> None:
        """Set the options of a loaded state, and request a comparison with the other ranks."""
        for group, saved in zip(self.param_groups, groups, strict=True):
            # a copy: a learning rate may be a tensor, which a scheduler changes
            options = {name: value for name, value in saved.items() if name != "params"}
            group.update(deepcopy(options))
        # no broadcast after this: buffers differ between ranks in the middle of a run
        self.is_broadcast = True
        self.on_load()
        self.comparison.request(self.steps, shared)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state between steps, without parameters, gradients and scratch.

        The state of an inner optimizer does not count.
        """
        return self.declared.num_bytes
