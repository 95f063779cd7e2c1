"""Old names of commands, options and values, which work until 0.3."""

from collections.abc import Mapping, Sequence
from typing import Any

COMMANDS = {"link": "pcie", "plan": "cost", "plan-cache": "cache-forecast"}
# by command, as fields of its config
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
# by command and by present name of the option
VALUES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "train": {"local_steps": {"usual": "default"}, "delay": {"usual": "default"}},
    "prepare": {"bidirected": {"as-usual": "auto"}, "duplicates": {"as-usual": "auto"}},
}


def rename_words(words: Sequence[str]) -> list[str]:
    """Replace old names on a command line by the present ones."""
    if not words:
        return []
    command = COMMANDS.get(words[0], words[0])
    options, changed, option = OPTIONS.get(command, {}), [command], ""
    for word in words[1:]:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            name = flag.removeprefix("--").replace("-", "_")
            no = "no-" if name.startswith("no_") else ""
            name = name.removeprefix("no_")
            option = options.get(name, name)
            flag = f"--{no}{option.replace('_', '-')}" if name in options else flag
            value = _renamed_value(command, option, value)
            changed.append(flag + equals + value)
            option = "" if equals else option
        else:
            changed.append(_renamed_value(command, option, word))
            option = ""
    return changed


def rename_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace old names in options of `train` from a file by the present ones, as field names."""
    found = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        name = OPTIONS["train"].get(name, name)
        found[name] = _renamed_value("train", name, value) if isinstance(value, str) else value
    return found


def _renamed_value(command: str, option: str, value: str) -> str:
    return VALUES.get(command, {}).get(option, {}).get(value, value)
