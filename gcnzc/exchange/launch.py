"""Read the environment variables that a launcher such as torchrun sets."""

import os

MAX_PORT = 65535


def is_worker() -> bool:
    """Whether a launcher such as torchrun has started this process as a worker."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def read_ranks() -> tuple[int, int]:
    """Return this worker's rank and the number of ranks.

    Raises:
        ValueError: they are not integers, or the rank is not in [0, world_size).
    """
    rank, world_size = _read_integer("RANK"), _read_integer("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"RANK={rank} with WORLD_SIZE={world_size}\n\nhint: the ranks of W workers are 0 to "
            "W - 1, and a launcher such as torchrun sets these environment variables"
        )
    return rank, world_size


def read_address() -> tuple[str, int]:
    """Return host and port of the store.

    Raises:
        ValueError: the port is not an integer from 1 to 65535.
    """
    port = _read_integer("MASTER_PORT")
    if not 1 <= port <= MAX_PORT:
        raise ValueError(
            f"MASTER_PORT={port} is invalid\n\n"
            f"hint: give a port from 1 to {MAX_PORT}, the same to all workers"
        )
    return os.environ["MASTER_ADDR"], port


def read_local_rank() -> int:
    """Return this worker's number among those of its machine, 0 without a launcher."""
    return _read_integer("LOCAL_RANK", "0")


def read_local_world_size() -> int:
    """Return the number of workers on this machine, 1 without a launcher."""
    return _read_integer("LOCAL_WORLD_SIZE", "1")


def _read_integer(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(
            f"the environment variable {name} is {text!r}\n\nhint: it is an integer that a "
            "launcher such as torchrun sets"
        ) from error
