"""Options that the caller has given, to distinguish them from defaults of the same value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C")

_GIVEN = "_given"


def remember_given(kind: type[C]) -> type[C]:
    """Decorate the dataclass of the options, so that `given_options` knows what the caller gave.

    A config that is copied, parsed by tyro or read from a run folder has all options; none of them
    counts as given.
    """
    initialize: Callable[..., None] = kind.__init__
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]

    @wraps(initialize)
    def initialize_and_remember(self: C, **options: Any) -> None:
        # `vars` of a config, the arguments of a copy, has the names too
        options.pop(_GIVEN, None)
        given = frozenset(options) if names - options.keys() else frozenset()
        # the dataclass is frozen
        object.__setattr__(self, _GIVEN, given)
        initialize(self, **options)

    kind.__init__ = initialize_and_remember  # type: ignore[method-assign,assignment]
    return kind


def copy_with_given(original: C, /, **changes: Any) -> C:
    """Return a copy of a config with other values, of which the same options count as given."""
    copied = replace(original, **changes)  # type: ignore[type-var]
    object.__setattr__(copied, _GIVEN, given_options(original))
    return copied


def given_options(config: Any) -> frozenset[str]:
    """Return the names of the options that the caller of the config's constructor has given."""
    return getattr(config, _GIVEN, frozenset())


def values_given(names: Sequence[str], words: Mapping[str, str], default: Any) -> Mapping[str, str]:
    """Return the options of a command line and of its --config file, as text.

    Args:
        names: names of options.
        words: the values on the command line by name; empty for those that are not given.
        default: the config of the file; None without one.
    """
    from_file = {
        name: str(getattr(default, name)) for name in names if name in given_options(default)
    }
    return {**from_file, **{name: value for name, value in words.items() if value}}
