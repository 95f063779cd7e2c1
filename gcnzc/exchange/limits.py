"""Check the time limits of groups."""

from numbers import Real

# gloo counts milliseconds
MIN_LIMIT_S = 1e-3
# 30 years; larger limits overflow the clocks of torch and Python
MAX_LIMIT_S = 1e9


def check_time_limit(seconds: object) -> float:
    """Return the `timeout_s` of a group as a float; numpy's numbers are accepted, bool is not.

    Raises:
        ValueError: it is not a number from `MIN_LIMIT_S` to `MAX_LIMIT_S`.
    """
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not MIN_LIMIT_S <= seconds <= MAX_LIMIT_S:  # type: ignore[operator]
        raise ValueError(
            f"timeout_s={seconds!r} of a group is invalid\n\n"
            f"hint: give the time limit of a wait in seconds, from {MIN_LIMIT_S:g} to "
            f"{MAX_LIMIT_S:g}, such as 60"
        )
    # timedelta rejects numpy's integers and float32
    return float(seconds)  # type: ignore[arg-type]
