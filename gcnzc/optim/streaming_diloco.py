"""Streaming DiLoCo: synchronize one fragment of the parameters at a time, overlapped with steps.

Every H steps an exchange of fragment p starts, which finishes D steps later:

    after step t       d_p   <- mean_i (a_p - x_p,i)           started
    after step t + D   b_p   <- m b_p + d_p
                       a_p   <- a_p - lr (d_p + m b_p)
                       x_p,i <- mix x_p,i + (1 - mix) a_p      with the current x

as in Douillard et al., "Streaming DiLoCo with overlapping communication" (2025,
https://arxiv.org/abs/2501.18512). The anchors a and momenta b are equal on all ranks; the
parameters differ until `finalize`. The first exchange of fragment p of P starts after step
round(p H / P) + H.

Each element is in exactly one fragment. A fragment is a range of the flat vector, or a set of whole
parameters that is selected by name; the flat vector has the parameters of each fragment together.

Notation: n elements, P fragments, H local steps, D the delay.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.exchange import Algorithm, Group
from gcnzc.optim.defaults import DELAY, FRAGMENTS, STREAMING_DILOCO
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.flat import FlatParameters
from gcnzc.optim.local_method import Fragment
from gcnzc.optim.state import Field, Number
from gcnzc.optim.sync_interval import INITIAL_STEPS, MAX_OVERLAP_SHARE
from gcnzc.optim.validation import check_count, check_range

THE_REST = "the rest"


class StreamingDiLoCo(DiLoCo):
    """Streaming DiLoCo: DiLoCo that exchanges fragments of the parameters, overlapped with steps.

    A single rank only takes the inner optimizer's steps, unless `alone`.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H, or "auto"; see `LocalMethod`.
        fragments: P, the number of fragments, of nearly equal sizes; or "modules" for one fragment
            for each submodule of the model, and for each member of its module lists; or regular
            expressions. Each expression selects the parameters whose names it is the first to
            match; parameters that match none are one more fragment.
        delay: D, the number of steps that overlap with an exchange, below H; or "auto", which
            requires local_steps="auto": the smallest D such that an exchange takes at most half
            the time of D steps.
        mixing: the weight of a rank's own parameters when a fragment is synchronized, from 0 to 1.
        outer_lr: the learning rate of the outer optimizer.
        outer_momentum: the Nesterov momentum of the outer optimizer.
        named_parameters: the model's `named_parameters()`, for fragments by name.
        options: the other options of `DiLoCo`, except `sharded`.

    Raises:
        ValueError: an option is out of range, options contradict each other, or the parameters of
            the ranks differ.
    """

    delay_steps: int
    """the current D"""
    period: int
    """H when the starts of the fragments' exchanges were distributed over the steps; 0 before"""
    compared_options = ("sizes", "delay", *DiLoCo.compared_options)

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = STREAMING_DILOCO.local_steps,
        fragments: int | str | Sequence[str] = FRAGMENTS,
        delay: int | str = DELAY,
        mixing: float = 0.5,
        outer_lr: float = STREAMING_DILOCO.outer_lr,
        outer_momentum: float = STREAMING_DILOCO.outer_momentum,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        **options: Any,
    ) -> None:
        if delay == "auto" and local_steps != "auto":
            raise ValueError(
                f"delay='auto' with local_steps={local_steps}\n\n"
                "hint: give local_steps='auto', which measures both"
            )
        if delay != "auto":
            # a fractional delay would never equal a step number
            check_count("delay", delay)
        check_range("mixing", mixing, lambda weight: 0 <= weight <= 1, "a number in [0, 1]")
        if options.get("sharded"):
            raise ValueError("sharded=True with fragments\n\nhint: omit it, or use DiLoCo")
        self.delay, self.mixing, self.requested = delay, mixing, fragments
        self._named = dict(named_parameters or ())
        # the ranks overlap exchanges with the steps, also while a delay of 0 steps is tried
        options.setdefault("target", MAX_OVERLAP_SHARE)
        super().__init__(
            inner,
            group,
            local_steps=local_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            delay_steps=1 if isinstance(delay, str) else int(delay),
            **options,
        )
        if self.delay_steps >= self.local_steps:
            raise ValueError(
                f"a delay of {delay} steps\n\nhint: give a delay from 0 to {self.local_steps - 1}, "
                "so that an exchange of a fragment finishes before the next one starts"
                + (f"; H is {INITIAL_STEPS} while it is measured" if local_steps == "auto" else "")
            )
        interval = self.sync_interval
        interval.least, interval.num_exchanges = self.delay_steps + 1, len(self.fragments)

    def lay_out(self) -> FlatParameters:
        """See `DistributedOptimizer`: the parameters of each fragment are together."""
        flat, requested, self._sizes = super().lay_out(), self.requested, []
        if isinstance(requested, int):
            total = flat.num_elements
            if not 1 <= requested <= total:
                raise ValueError(
                    f"{requested} fragments of {total:,} elements\n\nhint: give a number from 1 "
                    f"to {total}"
                )
            bounds = [total * number // requested for number in range(requested + 1)]
            self._sizes = [end - begin for begin, end in pairwise(bounds)]
            return flat
        parts = split_by_name(flat, requested, self._named)
        self._sizes = [sum(each.numel() for each in part) for part in parts.values()]
        return FlatParameters(self.param_groups, list(chain(*parts.values())))

    def fragment_sizes(self) -> list[int]:
        """See `LocalMethod`."""
        return self._sizes

    @property
    def sizes(self) -> str:
        """The numbers of elements of the fragments, as text."""
        return f"({', '.join(map(str, self._sizes))})"

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        fields = [*super().declare(), Number(self, "period")]
        return [*fields, Number(self, "delay_steps")] if self.delay == "auto" else fields

    def find_due(self, step: int) -> Algorithm[list[Fragment]]:
        """See `LocalMethod`; distributes the fragments over the first H steps, or over a new H."""
        if self.period != self.local_steps:
            self.period = self.local_steps
            for number, fragment in enumerate(self.fragments):
                offset = round(number * self.period / len(self.fragments))
                fragment.started = step - 1 + offset
            if self.delay == "auto":
                # H was measured
                steps = self.sync_interval.steps_per_exchange
                self.delay_steps = min(steps, self.period - 1)
        return (yield from super().find_due(step))

    def end_round(self) -> None:
        """See `LocalMethod`: the fragments are exchanged after the same steps as before."""


def split_by_name(
    flat: FlatParameters, requested: str | Sequence[str], named: Mapping[str, Tensor]
) -> dict[str, list[Tensor]]:
    """Split the parameters into fragments; return the parameters of each by its name.

    Args:
        flat: the parameters.
        requested: "modules", or regular expressions; see `StreamingDiLoCo`.
        named: the model's parameters by their names.

    Raises:
        ValueError: an expression is not valid, or selects no parameter; or a parameter has no name.
    """
    if requested != "modules" and not _are_expressions(requested):
        raise ValueError(
            f"fragments is {requested!r}\n\nhint: give a number, 'modules', or a list of regular "
            "expressions"
        )
    # the first name of a tied parameter
    names = {id(parameter): name for name, parameter in reversed(list(named.items()))}
    for segment in flat.segments:
        if id(segment.parameter) not in names:
            raise ValueError(
                f"no name for {segment.name} of the optimizer\n\nhint: for fragments by name, give "
                "named_parameters=model.named_parameters()"
            )
    found: dict[str, list[Tensor]] = {}
    if not isinstance(requested, str):
        found = {pattern: [] for pattern in [*requested, THE_REST]}
    for parameter in flat.parameters:
        name = names[id(parameter)]
        if isinstance(requested, str):
            key = _module_of(name)
        else:
            key = next((each for each in requested if re.search(each, name)), THE_REST)
        found.setdefault(key, []).append(parameter)
    if not found.get(THE_REST, [None]):
        del found[THE_REST]
    for pattern, parameters in found.items():
        if not parameters:
            raise ValueError(
                f"no parameter for the fragment {pattern!r}\n\nhint: a parameter is in the "
                "fragment of the first expression that is found in its name; the names are "
                f"{', '.join(names[id(each)] for each in flat.parameters)}"
            )
    return found


def _are_expressions(requested: object) -> bool:
    """Whether a value is a list of at least one valid regular expression."""
    if isinstance(requested, str) or not isinstance(requested, Sequence) or not requested:
        return False
    try:
        return all(re.compile(each) for each in requested)
    except (re.error, TypeError):
        return False


def _module_of(name: str) -> str:
    """Return the module of a parameter's name, such as `layers.0` for `layers.0.weight`.

    For `head.first.bias` it is `head`.
    """
    words = name.split(".")[:-1]
    depth = 2 if len(words) > 1 and words[1].isdigit() else 1
    return ".".join(words[:depth]) or "the model"
