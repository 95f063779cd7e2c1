"""Compare what must be the same on all ranks: options, `requires_grad`, steps and loaded states.

A scheduler that follows a rank's own loss gives each rank its own learning rate, and the replicas
go out of sync. Therefore exchanges of an optimizer also send one bit of a hash of the options and
of the number of the exchange. Ranks with equal options always send equal bits; ranks with
different options send different bits in about half of the exchanges. If bits differ, the ranks
exchange the options themselves and compare them.

A rank that has loaded a state, or whose parameters were frozen or unfrozen, sends a value that is
neither 0 nor 1, so that all ranks compare after this exchange.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from gcnzc.exchange import Algorithm, Group
from gcnzc.exchange.engine import hash_lines
from gcnzc.exchange.sync import all_gather_text, find_difference

# these choose an implementation for the rank's device and do not change the method
NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
# number of exchanges from one read of options on a GPU to the next; a read synchronizes with it
GPU_INTERVAL = 100
# how long a rank whose connections are broken waits for the others' lines, and its poll interval
STORE_WAIT_S, STORE_POLL_S = 5.0, 0.05
OPTIMIZER, STEPS, LOADED = "optimizer", "number of steps", "loaded state"
NORMS = "content of the loaded state"
CALL = "call"
TRAINED = "requires_grad of"
# types whose `repr` changes whenever the value does
_PLAIN = frozenset([str, int, float, bool, type(None)])
HINTS = {
    OPTIMIZER: "construct and step optimizers in the same order on all ranks; numbers count those "
    "of a group in the order of construction",
    STEPS: "call step() equally often on all ranks, and load the states of one checkpoint on all",
    LOADED: "load the states of one checkpoint on all ranks, before the same step",
    NORMS: "load the states of one checkpoint, of one run, on all ranks",
    CALL: "call step() equally often on all ranks, and then finalize()",
    TRAINED: "add, freeze and unfreeze parameters on all ranks, before the same step",
    # options of parameter groups
    "": "change options by what all ranks know, such as the step or the mean of their losses",
}
"""what to do about a line that differs between ranks, by the begin of its name"""


class Comparison:
    """Compares the lines of an optimizer between ranks.

    A line is a name, a tab and a value.
    """

    def __init__(self) -> None:
        self.count = 0
        """number of bits sent so far; equal on all ranks"""
        self.received = 0
        """number of sums received so far; equal on all ranks"""
        self.is_due = False
        """whether bits have differed since the last comparison; equal on all ranks"""
        self.is_requested = False
        """whether this rank requests a comparison at the next exchange"""
        self.loaded = "none"
        """description of the state that was loaded last; equal on all ranks"""
        self.loaded_norms = ""
        """norms of its tensors that are equal on all ranks, which ranks compare too"""
        self._option_key = self._option_text = ""

    def request(self, steps: int, shared: Mapping[str, Any]) -> None:
        """Request a comparison after a state was loaded.

        Args:
            steps: the number of steps of the state.
            shared: what ranks have in common of it.
        """
        self.loaded, self.loaded_norms = f"of step {steps}", format_norms(shared)
        self.is_requested = True

    def state_lines(self, optimizer: str, steps: int) -> list[str]:
        """Return the lines for an optimizer's name, its number of steps, and its loaded state.

        They come first: a different optimizer explains all other differences.
        """
        return [f"{OPTIMIZER}\t{optimizer}", f"{STEPS}\t{steps}", f"{LOADED}\t{self.loaded}"]

    def lines(self, optimizer: str, steps: int, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return all lines: also those for the norms, the options and `requires_grad`."""
        own = [*self.state_lines(optimizer, steps), f"{NORMS}\t{self.loaded_norms}"]
        return [*own, *option_lines(groups, with_gpu=True), *trained_lines(groups)]

    def bit(self, groups: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> float:
        """Return the number to send with the next exchange: a hash bit, or a comparison request.

        The bit is 0 or 1. The request is 0.5.

        Args:
            groups: the parameter groups, whose options are hashed.
            lines: other lines to hash.
        """
        self.count += 1
        if self.is_requested:
            # the sum over the ranks is then neither 0 nor their number
            return 0.5
        # a read of tensors on a GPU synchronizes with it
        options = self._format_options(groups, with_gpu=self.count % GPU_INTERVAL == 0)
        return float(hash_lines([str(self.count), *lines, options]) & 1)

    def _format_options(self, groups: Sequence[Mapping[str, Any]], *, with_gpu: bool) -> str:
        """Return the `option_lines`, joined by newlines; cached while no option changes."""
        key = option_key(groups)
        if not key or key != self._option_key:
            self._option_key = key
            self._option_text = "\n".join(option_lines(groups, with_gpu=with_gpu))
        return self._option_text

    def receive(self, total: float, ranks: int) -> None:
        """Update `is_due` with the sum of the numbers that `ranks` ranks sent."""
        self.received += 1
        self.is_due |= ranks > 1 and total not in (0, ranks)

    def compare(self, lines: Callable[[], list[str]]) -> Algorithm[bool]:
        """Compare the lines if bits have differed; otherwise communicate nothing.

        Args:
            lines: returns all that must be the same on all ranks.

        Returns:
            True if the lines were compared and are equal, False if they were not compared.

        Raises:
            ValueError: a line differs between ranks; raised on all ranks. The message has the
                name and both values.
        """
        if not self.is_due:
            return False
        self.is_due = self.is_requested = False
        texts = yield from all_gather_text("\n".join(lines()))
        if difference := find_difference(dict(enumerate(texts)), HINTS):
            raise ValueError(difference)
        return True


def find_difference_by_store(lines: Sequence[str], group: Group) -> str:
    """Compare lines through the group's store, after the connections of the group have failed.

    All ranks call it at about the same time.

    Returns:
        See `find_difference`; also empty if no other rank writes its lines within `STORE_WAIT_S`.
    """
    texts = {group.rank: "\n".join(lines)}
    end = time.monotonic() + STORE_WAIT_S
    # a store that is gone raises RuntimeError
    with suppress(RuntimeError):
        group.store.set(f"gcnzc/compared/{group.rank}", texts[group.rank])
        while len(texts) < group.world_size and time.monotonic() < end:
            for rank in set(range(group.world_size)) - set(texts):
                key = f"gcnzc/compared/{rank}"
                if group.store.check([key]):
                    texts[rank] = group.store.get(key).decode()
            time.sleep(STORE_POLL_S)
    return find_difference(texts, HINTS)


def format_norms(shared: Mapping[str, Any]) -> str:
    """Return the norms of the tensors of a state that ranks have in common, by name.

    States of different runs differ in them. Their four digits are equal on ranks that round
    differently. The parameters are compared by `Checksums`.
    """
    norms = []
    for name, value in sorted(shared.items()):
        if isinstance(value, Mapping):
            norms.append(format_norms(value))
        elif name != "parameters" and isinstance(value, Tensor) and value.is_floating_point():
            norms.append(f"{name} {float(value.detach().double().norm()):.4g}")
    return ", ".join(filter(None, norms))


def trained_lines(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each parameter group: which of its parameters have `requires_grad`."""
    lines = []
    for number, group in enumerate(groups):
        flags = [parameter.requires_grad for parameter in group["params"]]
        frozen = ", ".join(str(index) for index, flag in enumerate(flags) if not flag)
        found = f"False for parameters {frozen}" if frozen else "True for all parameters"
        lines.append(f"{TRAINED} parameter group {number}\t{found}, of {len(flags)}")
    return lines


def option_lines(groups: Sequence[Mapping[str, Any]], *, with_gpu: bool) -> list[str]:
    """Return a line for each option that must be the same on all ranks.

    Args:
        groups: the parameter groups of an optimizer.
        with_gpu: whether to read tensors on a GPU, which synchronizes with it.
    """
    return [
        f"{name} of parameter group {number}\t{_text(group[name], with_gpu=with_gpu)}"
        for number, group in enumerate(groups)
        for name in sorted(group)
        if name not in NOT_COMPARED and _is_compared(group[name])
    ]


def option_key(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a string that changes whenever an option changes; empty if there is none.

    There is none if an option is a tensor, which changes without a change of its identity, or an
    object of another type whose `repr` may not change with it.
    """
    options: list[object] = []
    kinds: set[type] = set()
    for group in groups:
        for name, value in group.items():
            if name not in ("params", "param_names"):
                options += name, value
                kinds.update(map(type, value) if type(value) in (tuple, list) else (type(value),))
    return repr(options) if _PLAIN.issuperset(kinds) else ""


def _is_compared(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_compared, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, bool | int | float | None)


def _text(value: Any, *, with_gpu: bool) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_text(each, with_gpu=with_gpu) for each in value)})"
    if isinstance(value, Tensor):
        return repr(value.item()) if with_gpu or value.device.type == "cpu" else "on a GPU"
    # an int and a float of the same value are equal
    return repr(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)
