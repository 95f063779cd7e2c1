"""Old names of commands, options and values, which work until 0.3."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from gcnzc.train.strategy_aliases import resolve_strategy, resolve_words

C = TypeVar("C")

COMMANDS = {"link": "pcie", "plan": "cost", "plan-cache": "cache-forecast"}
# by command: old names of the fields of its config, and the present ones
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "hot": "cache_size",
        "hot_by": "cache_policy",
        "hot_split": "cache_sharded",
        "eager": "eager_weight",
        "inner": "inner_optimizer",
        "plan": "tuning_profile",
    },
    "cost": {"picture": "out"},
    "check": {"hot_memory": "cache_memory"},
}
# by command: old flags, and the option, its value for --no-FLAG and its value for --FLAG instead
FLAGS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    "train": {"batch_norm": ("norm", "none", "batch")},
}
# by command: options that are positional arguments now, which follow all others
POSITIONAL: Mapping[str, Sequence[str]] = {"evaluate": ("data",)}
# by command and by present name of the option: old values, and the present ones
VALUES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "train": {"local_steps": {"usual": "default"}, "delay": {"usual": "default"}},
    "prepare": {
        "bidirected": {"as-usual": "auto"},
        "duplicates": {"as-usual": "auto"},
        "feature_dtype": {"as-is": "auto"},
    },
}


def rename_command_line(words: Sequence[str]) -> list[str]:
    """Replace old names in the words of a command line by the present ones.

    Raises:
        ValueError: an option is given by its old name and by its present one, or options
            contradict each other.
    """
    if not words:
        return []
    command = COMMANDS.get(words[0], words[0])
    options, changed, option = OPTIONS.get(command, {}), [command], ""
    flags: dict[str, str] = {}  # flags as given, by present name of their option
    positional: list[str] = []
    following = iter(words[1:])
    for word in following:
        flag, equals, value = word.partition("=")
        if flag.removeprefix("--") in POSITIONAL.get(command, ()) and flag.startswith("--"):
            value = value if equals else next(following, "")
            # without a value, the option is reported as unknown
            positional.append(value or word)
            continue
        if flag.startswith("--"):
            name = flag.removeprefix("--").replace("-", "_")
            no = "no-" if name.startswith("no_") else ""
            name = name.removeprefix("no_")
            if name in FLAGS.get(command, {}) and not equals:
                present, without, value = FLAGS[command][name]
                changed += [f"--{present}", without if no else value]
                option = ""
                continue
            option = options.get(name, name)
            other = flags.setdefault(option, flag)
            if other != flag and option in options.values() and no == _negation(other):
                raise ValueError(
                    f"{other} and {flag} are the same option\n\nhint: give one of them"
                )
            flag = f"--{no}{option.replace('_', '-')}" if name in options else flag
            value = _renamed_value(command, option, value)
            changed.append(flag + equals + value)
            option = "" if equals else option
        else:
            changed.append(_renamed_value(command, option, word))
            option = ""
    if command == "train":
        changed = resolve_words(changed)
    return changed + positional


def _negation(flag: str) -> str:
    return "no-" if flag.startswith(("--no-", "--no_")) else ""


def rename_options(
    values: Mapping[str, Any], source: str, command: str = "train"
) -> dict[str, Any]:
    """Replace old names of options and values by the present ones.

    Args:
        values: option names, with - or _, and their values.
        source: where the options are from, for the message.
        command: the command that has the options.

    Returns:
        The values by field name.

    Raises:
        ValueError: an option is given twice, by two spellings of its name, or options contradict
            each other.
    """
    found: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in FLAGS.get(command, {}) and isinstance(value, bool):
            name, *choices = FLAGS[command][name]
            value = choices[value]
        name = OPTIONS.get(command, {}).get(name, name)
        if name in found:
            raise ValueError(
                f"{source}: {spelling[name]} and {key} are the same option\n\n"
                f"hint: keep {name}, and remove the other"
            )
        spelling[name] = key
        found[name] = _renamed_value(command, name, value) if isinstance(value, str) else value
    return resolve_strategy(found, source) if command == "train" else found


def accept_old_options(command: str) -> Callable[[type[C]], type[C]]:
    """Return a decorator for a config class, with which old names work as keyword arguments.

    They cause a DeprecationWarning.

    Args:
        command: the command of the config.
    """

    old = {*OPTIONS.get(command, {}), *FLAGS.get(command, {})}

    def decorate(kind: type[C]) -> type[C]:
        initialize: Callable[..., None] = kind.__init__

        @wraps(initialize)
        def initialize_renamed(self: C, **options: Any) -> None:
            present = rename_options(options, kind.__name__, command)
            for name in options.keys() & old:
                other = OPTIONS[command].get(name) or FLAGS[command][name][0]
                warnings.warn(
                    f"option {name} of {kind.__name__} is now {other}; the old name will be "
                    "removed in 0.3",
                    DeprecationWarning,
                    stacklevel=2,
                )
            initialize(self, **present)

        kind.__init__ = initialize_renamed  # type: ignore[method-assign,assignment]
        return kind

    return decorate


def _renamed_value(command: str, option: str, value: str) -> str:
    return VALUES.get(command, {}).get(option, {}).get(value, value)
