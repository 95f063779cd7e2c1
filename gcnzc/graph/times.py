"""Convert times of nodes, edges and seeds: integers, or dates as integers since 1970."""

import datetime
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.graph.values import check_length, first_true, to_array, writable

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
# int64's least value, which NumPy and pandas write for a missing time (NaT)
MISSING_TIME = -(2**63)
# units of times, and their length in nanoseconds
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
# ISO 8601: a date, or a date and a time of day, which may have a time zone
ISO_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?)(?:(Z)|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)
# a date without separators, which is also an integer
COMPACT_DATE = re.compile(r"((?:19|20)\d\d|2100)(\d\d)(\d\d)", re.ASCII)
DATE_UNITS = {**UNITS, "m": 60 * 10**9, "h": 3600 * 10**9, "D": 86400 * 10**9}


def as_times(
    name: str, value: Any, count: int, unit: str | None, *, is_limit: bool = False
) -> Tensor:
    """Return times as a contiguous int64 tensor.

    Args:
        name: of the values, for messages.
        value: (count,) integers; floating-point numbers without fractions; or dates, see
            `to_dates`, which become the time since 1970 in `unit`.
        count: number of nodes, edges or seeds.
        unit: "s", "ms", "us" or "ns"; None for a graph whose times have no known unit.
        is_limit: the times are limits for neighbours. Dates are rounded down, so that no later
            neighbour is sampled; otherwise they are rounded up, so that no time is before its date.

    Raises:
        TypeError: the value is sparse, or not an array.
        ValueError: a time is missing or has a fraction, the shape is wrong, or there are dates and
            no unit.
    """
    dates = to_dates(value)
    times = to_array(name, value) if dates is None else dates
    check_length(name, times, count, dimensions=(1,))
    if dates is not None:
        if unit is None:
            raise ValueError(
                f"{name} has dates, but the times of the graph are integers whose unit is not "
                "known\n\nhint: pass integers like those of the graph; dates are converted if "
                "`graph.time_unit` is set, by building the graph from dates or with time_unit="
            )
        if (place := first_true(np.isnat(times))) is not None:
            raise _missing_time(name, place, "NaT")
        return torch.from_numpy(_since_1970(times, UNITS[unit], is_limit))
    if times.dtype.kind == "f":
        if (place := first_true(~np.isfinite(times))) is not None:
            raise _missing_time(name, place, str(times[place]))
        whole = (times == np.floor(times)) & (np.abs(times) < 2.0**63)
        if (place := first_true(~whole)) is not None:
            raise ValueError(
                f"{name}[{place}] is {times[place]}\n\nhint: times are integers; convert them to a "
                "smaller unit, such as milliseconds"
            )
    elif times.dtype.kind not in "iu":
        raise ValueError(f"{name} has type {times.dtype}\n\nhint: times are integers or dates")
    elif (place := first_true(times > np.iinfo(np.int64).max)) is not None:
        raise ValueError(
            f"{name}[{place}] is {times[place]}, which does not fit in int64\n\n"
            "hint: times are below 2**63; subtract the earliest, or use a larger unit"
        )
    converted = np.ascontiguousarray(times.astype(np.int64, copy=False))
    if (place := first_true(converted == MISSING_TIME)) is not None:
        raise _missing_time(name, place, "NaT")
    return torch.from_numpy(writable(converted))


def parse_times(texts: Sequence[str], unit: str | None) -> tuple[NDArray[np.int64], int | None]:
    """Convert strings to times that are limits for neighbours.

    Args:
        texts: n integers; or dates in ISO 8601, which become the time since 1970 in `unit`, rounded
            down. Dates without a time zone are taken as UTC. With a unit, an integer that could be
            a date, such as 20240301, is rejected as ambiguous: write 2024-03-01 for the date, or
            20240301s for the integer in the unit s.
        unit: see `as_times`.

    Returns:
        (n,) int64, and the position of the first text that is not a time, or None; see
        `describe_wrong_time`.

    Raises:
        ValueError: a date is out of the range of int64.
    """
    times = np.zeros(len(texts), np.int64)
    for place, text in enumerate(texts):
        digits = text if unit is None else text.removesuffix(unit)
        if _is_int64(digits) and (unit is None or digits != text or not _compact_date(text)):
            times[place] = int(digits)
            continue
        date = None if unit is None else _parse_date(text)
        if unit is None or date is None:
            return times, place
        times[place] = _since_1970(np.array([date]), UNITS[unit], True)[0]
    return times, None


def describe_wrong_time(where: str, text: str, unit: str | None) -> ValueError:
    """Return the error of a string that is not a time, for `parse_times`.

    Args:
        where: the beginning of the message, with the string.
        text: the string.
        unit: see `as_times`.
    """
    if unit is None:
        return ValueError(
            f"{where} is not a time\n\nhint: the times of the graph are plain integers, without a "
            "unit; dates are accepted if the graph is built from dates or with time_unit="
        )
    if not (date := _compact_date(text)):
        return ValueError(
            f"{where} is not a time\n\nhint: times are dates such as 2024-03-01 (UTC), or integers "
            f"in {unit} since 1970"
        )
    # at most 8 months after 1970, so datetime64 can represent it
    moment = np.datetime64(int(text), unit)  # type: ignore[call-overload]
    return ValueError(
        f"{where} could be the date {date}, or {text} {unit} since 1970, which is {moment}\n\n"
        f"hint: write {date} for the date, or {text}{unit} for the integer"
    )


def _compact_date(text: str) -> str | None:
    """Return the date of a string such as 20240301, from 1900 to 2100, in ISO 8601; else None."""
    found = COMPACT_DATE.fullmatch(text)
    date = "-".join(found.groups()) if found else ""
    return date if _parse_date(date) is not None else None


def _is_int64(text: str) -> bool:
    digits = text.removeprefix("-")
    # int() rejects strings of thousands of digits
    if not (digits.isdecimal() and digits.isascii() and len(digits) < 100):
        return False
    return -(2**63) <= int(text) < 2**63


def _parse_date(text: str) -> np.datetime64 | None:
    found = ISO_DATE.fullmatch(text)
    if found is None:
        return None
    try:
        date = np.datetime64(found[1])
    except ValueError:
        # such as the month 13
        return None
    if found[3] is None:
        return date
    minutes = int(found[3] + found[4]) * 60 + int(found[3] + found[5])
    return date - np.timedelta64(minutes, "m")


def to_dates(value: Any) -> NDArray[Any] | None:
    """Return dates or durations as datetime64 or timedelta64; None for other values.

    Dates are those of NumPy, of pandas and of Python's `datetime`, also in lists. Dates with a time
    zone are converted to UTC; dates without one are taken as UTC.
    """
    if isinstance(value, Tensor):
        return None
    dtype: Any = getattr(value, "dtype", None)
    if getattr(dtype, "tz", None) is not None:
        # pandas returns UTC
        return np.asarray(value.to_numpy(f"datetime64[{dtype.unit}]"))
    try:
        found = to_array("times", value)
    except TypeError:
        return None
    if found.dtype.kind in "mM":
        return found
    if found.dtype != object or found.ndim != 1 or not len(found):
        return None
    is_date = [isinstance(each, datetime.date) for each in found]
    has_others = any(not own and each is not None for own, each in zip(is_date, found, strict=True))
    if has_others or not any(is_date):
        return None
    return np.array([_to_date(each) for each in found])


def _to_date(value: Any) -> np.datetime64:
    if value is None:
        return np.datetime64("NaT")
    if hasattr(value, "to_datetime64"):
        # of pandas: in UTC
        found: np.datetime64 = value.to_datetime64()
        return found
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    return np.datetime64(value)


def _since_1970(times: NDArray[Any], unit: int, is_limit: bool) -> NDArray[np.int64]:
    """Return dates or durations as int64 multiples of `unit` nanoseconds; see `as_times`."""
    name, count = np.datetime_data(times.dtype)
    if name not in DATE_UNITS:
        # years, months and weeks
        times, name, count = times.astype(f"{times.dtype.kind}8[s]"), "s", 1
    own = DATE_UNITS[name] * count
    if own % unit and unit % own:
        times, own = times.astype(f"{times.dtype.kind}8[ns]"), 1
    ticks = times.astype(np.int64)
    if own % unit:
        ratio = unit // own
        return ticks // ratio if is_limit else -(-ticks // ratio)
    factor = own // unit
    limit = np.iinfo(np.int64).max // factor
    if (place := first_true((ticks > limit) | (ticks < -limit))) is not None:
        raise ValueError(
            f"the date {times[place]} at position {place} is out of the range of int64 in this "
            "time_unit\n\nhint: use a larger time_unit, such as 's'"
        )
    found: NDArray[np.int64] = ticks * factor
    return found


def _missing_time(name: str, place: int, value: str) -> ValueError:
    return ValueError(
        f"{name}[{place}] is {value}, a missing time\n\n"
        "hint: remove these rows, or give them a time; a type without any times is always visible"
    )
