"""What a rank adds to exchanges besides its gradients or parameters: its weight and its signals."""

from collections.abc import Sequence

from gcnzc.optim.validation import check_at_least_zero
from gcnzc.system.arguments import check_flag, check_kind, describe

MAX_SIGNALS = 1000
"""the largest number of signals, since every exchange has a number for each"""


class Contribution:
    """The attributes `weight` and `signals` of an optimizer; setting invalid values is an error."""

    _weight: float
    _signals: list[bool]
    received_signals: list[bool]

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
        count = len(self.received_signals)
        check_kind("signals", values, (list, tuple), f"a list of {count} flags")
        if len(values) != count:
            raise ValueError(
                f"signals is {describe(values)}, but the optimizer was constructed with "
                f"signals={count}\n\nhint: give the constructor signals={len(values)} on all ranks"
            )
        self._signals = [check_flag(f"signals[{index}]", each) for index, each in enumerate(values)]
