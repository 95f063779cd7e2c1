"""Declare the options of a method once: its constructor, checks and comparisons follow.

A class declares each option as an attribute, with its default and its check:

    class DiLoCo(LocalMethod):
        outer_lr: float = option(0.4, check_at_least_zero)

The constructor of `DistributedOptimizer` takes the options of the class and of its bases by name,
checks them and sets the attributes. The ranks compare them before the first step.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[str, Any], object]
REQUIRED = Parameter.empty


@dataclass(frozen=True, eq=False)
class Option:
    """The declaration of an option; see `option`."""

    default: Any
    check: Check | None
    is_optional: bool
    is_compared: bool
    is_saved: bool
    name: str | None


def option(
    default: Any = REQUIRED,
    check: Check | None = None,
    *,
    is_optional: bool = False,
    is_compared: bool = True,
    is_saved: bool = False,
    name: str | None = None,
) -> Any:
    """Declare an option of a method; assign the result to an attribute of the class.

    A subclass may declare it again, with another default. It removes the option if it assigns any
    other value to the attribute.

    Args:
        default: the default; without one, the constructor requires the option.
        check: called with the name and the value; raises an error if the value is not valid, and
            may return a converted value.
        is_optional: whether None is valid; it always is if it is the default.
        is_compared: whether the option must be equal on all ranks.
        is_saved: whether the state depends on it, so that a loaded state must have it too.
        name: the name of the constructor's argument; that of the attribute if None.
    """
    return Option(default, check, is_optional or default is None, is_compared, is_saved, name)


def declared_options(kind: type) -> dict[str, Option]:
    """Return the options of a class by their attributes; those of its bases first."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        found.update(vars(each))
    return {name: each for name, each in found.items() if isinstance(each, Option)}


def set_options(owner: object, given: Mapping[str, Any]) -> None:
    """Set the options of an object, after their checks.

    Raises:
        TypeError: there is no such option, or a required one is missing.
    """
    kind, given = type(owner), dict(given)
    options = declared_options(kind)
    for attribute, each in options.items():
        name = each.name or attribute
        value = given.pop(name, each.default)
        if value is REQUIRED:
            raise TypeError(f"{kind.__name__} needs the option {name}")
        if each.check is not None and not (value is None and each.is_optional):
            converted = each.check(name, value)
            value = value if converted is None else converted
        setattr(owner, attribute, value)
    if given:
        names = sorted(each.name or attribute for attribute, each in options.items())
        raise TypeError(
            f"{kind.__name__} has no option {', '.join(given)}\n\nhint: its options are "
            f"{', '.join(names)}"
        )


def signature_of(kind: type) -> inspect.Signature:
    """Return the signature of a constructor that takes the options of its class by name."""
    _, *named = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    parameters = {each.name: each for each in named if each.kind is not Parameter.VAR_KEYWORD}
    for attribute, each in declared_options(kind).items():
        name = each.name or attribute
        parameters[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=each.default)
    return inspect.Signature(list(parameters.values()))
