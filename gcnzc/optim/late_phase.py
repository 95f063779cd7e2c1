"""Warn if a phase of an optimizer, such as compression, begins late in the run, or never."""

import warnings

from gcnzc.optim.defaults import LATE_SHARE, LATE_STEPS

SHORTER_WARMUP = "a shorter warm-up (`warmup`, --warmup of gcnzc train) lets it begin sooner"
FEWER_LOCAL_STEPS = (
    "fewer local steps (`local_steps`, --local-steps of gcnzc train) let it begin sooner"
)


class LatePhaseWarning(UserWarning):
    """A phase of an optimizer, such as compression or local steps, begins late in the run or never.

    Rank 0 warns. `warnings.simplefilter("ignore", gcnzc.optim.LatePhaseWarning)` silences it.
    """


def late_step(total_steps: int | None) -> int:
    """Return the number of steps after which a phase begins late.

    Args:
        total_steps: the number of steps of the run; None if it is not known.
    """
    return LATE_STEPS if total_steps is None else max(1, round(LATE_SHARE * total_steps))


def warn_of_late_phase(
    optimizer: str, phase: str, remedy: str, steps: int, total_steps: int | None
) -> None:
    """Warn that a phase has not begun.

    Args:
        optimizer: the name of the optimizer's type.
        phase: the name of the phase.
        remedy: how to let it begin sooner.
        steps: the number of steps so far.
        total_steps: see `late_step`.
    """
    length = "" if total_steps is None else f" of {total_steps}"
    warnings.warn(
        f"{optimizer}: no {phase} in the first {steps} steps{length}\n\nhint: {remedy}",
        LatePhaseWarning,
        stacklevel=3,
    )
