"""Streaming DiLoCo: synchronize one fragment of the parameters at a time, overlapped with steps.

Every H steps an exchange of fragment p starts, which finishes D steps later:

    after step t       d_p   <- mean_i (a_p - x_p,i)           started
    after step t + D   b_p   <- μ b_p + d_p
                       a_p   <- a_p - lr (d_p + μ b_p)
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
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from torch import Tensor

from gcnzc.exchange import Algorithm
from gcnzc.optim.defaults import DELAY, FRAGMENTS, STREAMING_DILOCO
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.flat import FlatParameters
from gcnzc.optim.local_method import Fragment
from gcnzc.optim.options import option
from gcnzc.optim.state import scalar
from gcnzc.optim.sync_interval import INITIAL_STEPS
from gcnzc.optim.validation import check_at_least_zero, check_count, check_fraction, check_share

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
        options: the other options of `DiLoCo`, except `sharded`; fragments by name need `module`.

    Raises:
        ValueError: an option is out of range, options contradict each other, or the parameters of
            the ranks differ.
    """

    local_steps: Any = option(STREAMING_DILOCO.local_steps)
    outer_lr: float = option(STREAMING_DILOCO.outer_lr, check_at_least_zero)
    outer_momentum: float = option(STREAMING_DILOCO.outer_momentum, check_fraction)
    requested: int | str | Sequence[str] = option(FRAGMENTS, is_compared=False, name="fragments")
    delay: int | str = option(DELAY)
    mixing: float = option(0.5, check_share)

    delay_steps: int = scalar(when=lambda own: own.delay == "auto")
    """the current D"""
    period: int = scalar()
    """H when the starts of the fragments' exchanges were distributed over the steps; 0 before"""
    sizes: list[int]
    """the numbers of elements of the fragments"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        if self.delay == "auto" and self.local_steps != "auto":
            raise ValueError(
                f"delay='auto' with local_steps={self.local_steps}\n\nhint: give 'auto'"
            )
        if self.delay != "auto":
            # a fractional delay would never equal a step number
            check_count("delay", self.delay)
        if self.sharded:
            raise ValueError("sharded=True with fragments\n\nhint: omit it, or use DiLoCo")
        self.delay_steps = 1 if self.delay == "auto" else int(self.delay)
        super().configure()
        if self.delay_steps >= self.local_steps:
            raise ValueError(
                f"a delay of {self.delay} steps\n\nhint: give a delay from 0 to "
                f"{self.local_steps - 1}, so that an exchange of a fragment finishes before the "
                f"next one starts; H is {INITIAL_STEPS} while it is measured"
            )
        self.sync_interval.least = self.delay_steps + 1

    def compared_options(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; includes the sizes of the fragments."""
        return super().compared_options() | {"sizes": self.sizes}

    def start(self) -> None:
        """See `DistributedOptimizer`."""
        super().start()
        self.sync_interval.num_exchanges = len(self.fragments)

    def lay_out(self) -> FlatParameters:
        """See `DistributedOptimizer`: the parameters of each fragment are together."""
        flat, count = super().lay_out(), self.requested
        if isinstance(count, int):
            if not 1 <= count <= flat.num_elements:
                raise ValueError(
                    f"{count} fragments of {flat.num_elements:,} elements\n\nhint: give a number "
                    f"from 1 to {flat.num_elements}"
                )
            bounds = [flat.num_elements * number // count for number in range(count + 1)]
            self.sizes = [end - begin for begin, end in pairwise(bounds)]
            return flat
        named = {} if self.module is None else dict(self.module.named_parameters())
        parts = split_by_name(flat, count, named)
        self.sizes = [sum(each.numel() for each in part) for part in parts]
        return FlatParameters(self.param_groups, list(chain(*parts)))

    def fragment_sizes(self) -> list[int]:
        """See `LocalMethod`."""
        return self.sizes

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
) -> list[list[Tensor]]:
    """Return the parameters of each fragment.

    Args:
        flat: the parameters.
        requested: "modules", or regular expressions; see `StreamingDiLoCo`.
        named: the model's parameters by their names.

    Raises:
        ValueError: an expression selects no parameter, or a parameter has no name.
    """
    expressions = [] if requested == "modules" else requested
    if isinstance(expressions, str):
        raise ValueError(f"fragments is {requested!r}\n\nhint: give a number, 'modules', or a list")
    names = {id(parameter): name for name, parameter in named.items()}
    found: dict[str, list[Tensor]] = {each: [] for each in expressions}
    for segment in flat.segments:
        name = names.get(id(segment.parameter))
        if name is None:
            raise ValueError(
                f"no name for {segment.name} of the optimizer\n\nhint: for fragments by name, give "
                "module=model"
            )
        other = _module_of(name) if requested == "modules" else THE_REST
        key = next((each for each in expressions if re.search(each, name)), other)
        found.setdefault(key, []).append(segment.parameter)
    for key, parameters in found.items():
        if not parameters:
            raise ValueError(
                f"no parameter for the fragment {key!r}\n\nhint: a parameter is in the fragment of "
                "the first expression that is found in its name; the names are "
                f"{', '.join(names.values())}"
            )
    return list(found.values())


def _module_of(name: str) -> str:
    """Return the module of a parameter's name, such as `layers.0` for `layers.0.weight`.

    For `head.first.bias` it is `head`.
    """
    words = name.split(".")[:-1]
    depth = 2 if len(words) > 1 and words[1].isdigit() else 1
    return ".".join(words[:depth]) or "the model"
