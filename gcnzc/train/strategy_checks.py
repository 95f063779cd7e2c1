"""Check the options of a run that its strategy does not support, before the run begins."""

from typing import TYPE_CHECKING

from gcnzc.optim.defaults import LOCAL
from gcnzc.train.optimizer_options import ONE_BIT
from gcnzc.train.options import option_name
from gcnzc.train.strategies import STRATEGIES

if TYPE_CHECKING:
    from gcnzc.train.config import TrainConfig


def check_strategy(config: "TrainConfig") -> None:
    """Check that the precision, clipping and number of workers of a run fit its strategy.

    The number of workers that torchrun starts is not known here; see `check_workers`.

    Raises:
        ValueError: an option contradicts the strategy.
    """
    if STRATEGIES[config.strategy].needs_closure:
        _check_closure(config)
    if config.strategy == "streaming-diloco":
        _check_delay(config)
    if config.workers > 1:
        check_workers(config, config.workers)


def check_workers(config: "TrainConfig", workers: int) -> None:
    """Check that a number of workers fits the strategy of a run.

    Args:
        config: the options of the run.
        workers: the number of workers, also if torchrun has started them.

    Raises:
        ValueError: an option contradicts the number of workers.
    """
    participants = config.participants
    if config.strategy != "fedglomo" or participants is None or participants <= workers:
        return
    found = f"--workers {workers}" if workers == config.workers else f"{workers} workers"
    remedy = f"--participants {workers} or less"
    if workers == 1:
        found = "one worker"
        remedy = f"--workers {participants} or more, or start as many with torchrun"
    raise ValueError(f"--participants {participants} with {found}\n\nhint: give {remedy}")


def format_one_worker_warning(config: "TrainConfig", workers: int) -> str:
    """Return a warning if options that are for several workers are given for one; else "".

    Args:
        config: the options of the run.
        workers: the number of workers.
    """
    if workers > 1:
        return ""
    names = {
        "strategy": config.strategy != "average",
        "optimizer": config.optimizer in ONE_BIT,
        "compress": config.compress not in ("auto", "float32"),
        "seed_order": config.seed_order != "shuffled",
    }
    given = [f"{option_name(name)} {getattr(config, name)}" for name in names if names[name]]
    if not given:
        return ""
    return (
        f"{', '.join(given)} with one worker, which exchanges nothing; give --workers N, or start "
        "several workers with torchrun"
    )


def _check_delay(config: "TrainConfig") -> None:
    is_default = config.local_steps == "default"
    steps = str(LOCAL["streaming-diloco"].local_steps) if is_default else config.local_steps
    if steps.isdecimal() and config.delay.isdecimal() and int(config.delay) >= int(steps):
        raise ValueError(
            f"--delay {config.delay} with --local-steps {steps}\n\nhint: give a --delay below "
            "--local-steps, so that an exchange finishes before the next one starts"
        )


def _check_closure(config: "TrainConfig") -> None:
    if config.precision == "fp16":
        raise ValueError(
            f"--precision fp16 with --strategy {config.strategy}, which computes several gradients "
            "in a step, and torch's GradScaler supports one\n\nhint: use --precision bf16"
        )
    if config.clip_gradients is not None:
        raise ValueError(
            f"--strategy {config.strategy} does not support --clip-gradients\n\n"
            "hint: omit --clip-gradients, and reduce --lr if training diverges"
        )
