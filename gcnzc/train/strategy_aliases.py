"""Aliases: `--optimizer diloco --inner-optimizer sgd` is `--strategy diloco --optimizer sgd`."""

from collections.abc import Mapping, Sequence
from typing import Any

# strategies that --optimizer also accepts; --inner-optimizer is then the update rule
STRATEGY_ALIASES = ("local-sgd", "diloco", "streaming-diloco", "co2")
NAMES = ("optimizer", "inner_optimizer", "strategy")


def resolve_strategy(values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return options with `strategy` and `optimizer` in place of their aliases.

    Args:
        values: options by field name. The option `resume` marks a complete set: the options of a
            run folder or of a copied config, in which an alias replaces the other options.
        source: where the options are from, for the message; empty for the command line.

    Raises:
        ValueError: two options contradict each other.
    """
    found = dict(values)
    is_complete = "resume" in found
    optimizer, inner = found.get("optimizer"), found.pop("inner_optimizer", None)
    if optimizer in STRATEGY_ALIASES:
        other = found.get("strategy", optimizer)
        if other != optimizer and not is_complete:
            raise ValueError(
                f"{_format({'optimizer': optimizer, 'strategy': other}, source)} are different "
                f"strategies\n\nhint: keep {_spell('strategy', source)}, and give "
                f"{_spell('optimizer', source)} an update rule, such as adamw"
            )
        found["strategy"] = optimizer
        del found["optimizer"]
        if inner is not None:
            found["optimizer"] = inner
    # complete options of older versions have an inner optimizer for every optimizer
    elif inner is not None and not (is_complete and "strategy" not in found):
        if optimizer not in (None, inner) and not is_complete:
            raise ValueError(
                f"{_format({'optimizer': optimizer, 'inner_optimizer': inner}, source)} are "
                f"different update rules\n\nhint: keep {_spell('optimizer', source)}, and omit "
                f"{_spell('inner_optimizer', source)}"
            )
        found["optimizer"] = inner
    return found


def _format(values: Mapping[str, Any], source: str) -> str:
    """Return options with their values, for a message."""
    given = " and ".join(f"{_spell(name, source)} {value}" for name, value in values.items())
    return f"{source}: {given}" if source else given


def _spell(name: str, source: str) -> str:
    """Return the name of an option in a file or a call, or its flag on the command line."""
    return name if source else f"--{name.replace('_', '-')}"


def resolve_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `--strategy` in place of its aliases.

    Raises:
        ValueError: two options contradict each other.
    """
    values: dict[str, str] = {}
    others: list[str] = []
    following = iter(words)
    for word in following:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in NAMES:
            others.append(word)
            continue
        value = value if equals else next(following, "")
        if not value or value.startswith("--"):
            # the parser reports the missing value; it has no option --inner-optimizer
            present = _spell("optimizer" if name == "inner_optimizer" else name, "")
            return [present if each == word else each for each in words]
        values[name] = value
    chosen = [f"{_spell(name, '')}={value}" for name, value in resolve_strategy(values).items()]
    return [*others[:1], *chosen, *others[1:]]
