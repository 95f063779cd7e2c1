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
    if config.strategy == "diloco":
        _check_quorum(config)
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
    participants, quorum = config.participants, config.quorum
    if config.strategy == "fedglomo" and participants is not None and participants > workers:
        remedy = f"--participants {workers} or less"
        if workers == 1:
            remedy = f"--workers {participants} or more, or start as many with torchrun"
        _reject_number(config, "participants", workers, remedy)
    if config.strategy != "diloco" or quorum is None or workers < 2 * quorum <= 2 * workers:
        return
    least = workers // 2 + 1
    valid = f"{least} to {workers}" if least < workers else f"{least}"
    remedy = f"--quorum {valid}, more than half of the workers"
    if workers == 1:
        remedy = f"--workers {quorum} to {2 * quorum - 1}, or start as many with torchrun"
    _reject_number(config, "quorum", workers, remedy)


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


def _reject_number(config: "TrainConfig", name: str, workers: int, remedy: str) -> None:
    given = f"{option_name(name)} {getattr(config, name)}"
    found = f"--workers {workers}" if workers == config.workers else f"{workers} workers"
    if workers == 1:
        found = "one worker"
    raise ValueError(f"{given} with {found}\n\nhint: give {remedy}")


def _check_quorum(config: "TrainConfig") -> None:
    if config.quorum is None:
        if config.grace_s is not None:
            raise ValueError(
                f"--grace-s {config.grace_s} with --strategy diloco has no effect without --quorum"
                "\n\nhint: also choose a --quorum, more than half of the workers"
            )
        return
    excluded = {
        "compress": config.compress not in ("auto", "float32"),
        "local_steps": config.local_steps == "auto",
    }
    for name in (name for name, is_given in excluded.items() if is_given):
        raise ValueError(
            f"--quorum {config.quorum} with {option_name(name)} {getattr(config, name)}\n\n"
            "hint: omit one of them"
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
