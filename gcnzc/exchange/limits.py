"""Check the time limits of groups."""

# gloo counts milliseconds
LEAST_LIMIT_S = 1e-3
# 30 years; larger limits overflow the clocks of torch and Python
MOST_LIMIT_S = 1e9


def check_time_limit(seconds: object) -> None:
    """Check the `timeout_s` of a group.

    Raises:
        ValueError: it is not a number from `LEAST_LIMIT_S` to `MOST_LIMIT_S`.
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not LEAST_LIMIT_S <= seconds <= MOST_LIMIT_S:  # type: ignore[operator]
        raise ValueError(
            f"a group with timeout_s={seconds!r}\n\nhint: give the time limit of a wait in "
            f"seconds, from {LEAST_LIMIT_S:g} to {MOST_LIMIT_S:g}, such as 60"
        )
