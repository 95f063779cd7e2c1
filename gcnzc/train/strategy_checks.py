"""Check the options of a run that its strategy does not support, before the run begins."""

from typing import TYPE_CHECKING

from gcnzc.optim.defaults import LOCAL
from gcnzc.train.options import option_name
from gcnzc.train.strategies import STRATEGIES

if TYPE_CHECKING:
    from gcnzc.train.config import TrainConfig


def check_strategy(config: "TrainConfig") -> None:
    """Check that the precision, clipping and number of workers of a run fit its strategy.

    The number of workers that torchrun starts is not known here; the optimizer checks it.

    Raises:
        ValueError: an option contradicts the strategy.
    """
    if STRATEGIES[config.strategy].needs_closure:
        _check_closure(config)
    if config.participants is not None and 1 < config.workers < config.participants:
        _reject_number(config, "participants", "at most the number of workers")
    if config.strategy == "diloco":
        _check_quorum(config)
    if config.strategy == "streaming-diloco":
        _check_delay(config)


def _check_delay(config: "TrainConfig") -> None:
    is_default = config.local_steps == "default"
    steps = str(LOCAL["streaming-diloco"].local_steps) if is_default else config.local_steps
    if steps.isdecimal() and config.delay.isdecimal() and int(config.delay) >= int(steps):
        raise ValueError(
            f"--delay {config.delay} with --local-steps {steps}\n\nhint: give a --delay below "
            "--local-steps, so that an exchange finishes before the next one starts"
        )


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
    if config.workers > 1 and not config.workers < 2 * config.quorum <= 2 * config.workers:
        least = config.workers // 2 + 1
        valid = f"{least} to {config.workers}" if least < config.workers else f"{least}"
        _reject_number(config, "quorum", f"{valid}, more than half of them")


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


def _reject_number(config: "TrainConfig", name: str, limit: str) -> None:
    raise ValueError(
        f"{option_name(name)} {getattr(config, name)} with --workers {config.workers}\n\n"
        f"hint: give {limit}"
    )
