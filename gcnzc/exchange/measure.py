"""Measure collective algorithms on the ranks of a group, and cache the times in a file.

All ranks time the same requests and exchange their times, so that all make the same choices.

Notation: R rounds, A algorithms.
"""

import hashlib
import json
import random
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.algorithms import ALGORITHMS
from gcnzc.exchange.choices import Choices
from gcnzc.exchange.collectives import AllGather, AllGatherScalar, AllToAll, Broadcast, Sum
from gcnzc.exchange.group import Group
from gcnzc.exchange.requests import Collective, yield_request
from gcnzc.exchange.tuner import KINDS, PIECES, SIZES, Times, Tuning, measure
from gcnzc.system import files

# length to which names of machines are cut and padded
HOST_BYTES = 64


def tune(
    group: Group,
    folder: Path,
    sizes: Mapping[str, Sequence[int]] | None = None,
    *,
    budget_s: float = 60.0,
    again: bool = False,
) -> Tuning:
    """Measure collective algorithms on a group, and return all measured times and the choices.

    All ranks must call it with the same arguments. Times in the cache file are not measured again.
    Nothing is measured over NCCL, which has its own tuner, or for a single rank. The group's ledger
    counts the messages of the measurement.

    Args:
        group: the ranks; its `choices` are not changed.
        folder: the folder of the cache file, created if needed; only that of rank 0 is used.
        sizes: sizes in bytes to measure, by kind, one of `KINDS`; None measures all kinds at
            `SIZES`.
        budget_s: approximate limit of the measurement in seconds. The largest sizes are left out
            first, and are not measured by later calls either.
        again: measure the sizes even if the cache file has their times.

    Raises:
        ValueError: a kind has no algorithms to choose from.
        WorkerLost: another rank did not respond in time, or has ended.
    """
    requested = dict.fromkeys(KINDS, SIZES) if sizes is None else sizes
    for kind in requested:
        if kind not in KINDS:
            raise ValueError(f"no choice for {kind}\n\nhint: use one of {', '.join(KINDS)}")
    if group.world_size == 1 or group.backend == "nccl":
        return Tuning({})
    environment = _describe_environment(group)
    digest = hashlib.sha256(json.dumps(environment).encode()).hexdigest()
    path = folder / f"collectives-{digest[:16]}.json"
    times = _read_and_broadcast(group, path)
    known = {} if again else times
    missing = {kind: sorted({*requested[kind]} - {*known.get(kind, {})}) for kind in requested}
    missing = {kind: of_kind for kind, of_kind in missing.items() if of_kind}
    if not missing:
        return Tuning(times)
    new = measure(
        lambda *case: _time_fastest_rounds(group, *case), missing, group.world_size, budget_s
    )
    group.free_buffers()
    for kind, by_size in new.items():
        times[kind] = times.get(kind, {}) | by_size
    if group.rank == 0:
        _write(path, environment, times)
    return Tuning(times)


def make_request(kind: str, num_bytes: int, rank: int, world_size: int) -> Collective:
    """Create a request of zeros, of about `num_bytes` bytes."""
    values = torch.zeros(num_bytes, dtype=torch.uint8)
    if kind == "Sum":
        return Sum(torch.zeros(max(num_bytes // 4, 1)))
    if kind == "AllGather":
        return AllGather(values)
    if kind == "Broadcast":
        return Broadcast(values)
    assert kind == "AllToAll", "the other kinds have one algorithm"
    parts = values.tensor_split(world_size)
    return AllToAll(parts, [len(parts[rank])] * world_size)


def time_algorithms(
    group: Group, kind: str, num_bytes: int, names: Sequence[str], rounds: int
) -> Tensor:
    """Time algorithms on all ranks, after a warm-up round, in a random order in each round.

    An all-gather precedes each algorithm, so that all ranks start it at about the same time.

    Returns:
        (R, A) float64: seconds on the slowest rank, the same on all ranks.
    """
    request = make_request(kind, num_bytes, group.rank, group.world_size)
    seconds = torch.empty(1 + rounds, len(names), dtype=torch.float64)
    choices, shuffler = group.choices, random.Random(0)
    try:
        for turn in range(1 + rounds):
            for index in shuffler.sample(range(len(names)), len(names)):
                group.choices = Choices.always(**{kind: names[index]})
                group.run(yield_request(AllGatherScalar(0)))
                begin = time.perf_counter()
                group.run(yield_request(request))
                seconds[turn, index] = time.perf_counter() - begin
    finally:
        group.choices = choices
    gathered = group.run(yield_request(AllGather(seconds[1:].flatten())))
    return gathered.amax(0).view(rounds, len(names))


def _time_fastest_rounds(
    group: Group, kind: str, num_bytes: int, names: Sequence[str], rounds: int
) -> tuple[list[float], float]:
    """Return the seconds of each algorithm's fastest round, and of the whole measurement."""
    begin = time.perf_counter()
    seconds = time_algorithms(group, kind, num_bytes, names, rounds)
    # the fastest round, since other load on the machines only adds time
    return seconds.amin(0).tolist(), max(
        group.run(yield_request(AllGatherScalar(time.perf_counter() - begin)))
    )


def _describe_environment(group: Group) -> dict[str, Any]:
    """Return what the times depend on; its hash is part of the cache file's name."""
    host = torch.zeros(HOST_BYTES, dtype=torch.uint8)
    name = socket.gethostname().encode()[:HOST_BYTES]
    host[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
    return {
        "backend": group.backend,
        "hosts": [
            bytes(each.tolist()).rstrip(b"\0").decode()
            for each in group.run(yield_request(AllGather(host)))
        ],
        "torch": torch.__version__,
        "algorithms": {kind: ALGORITHMS[kind] for kind in KINDS},
        "pieces": PIECES,
    }


def _read_and_broadcast(group: Group, path: Path) -> Times:
    """Read times from a file on rank 0, and broadcast them."""
    text = json.dumps(_read(path)).encode() if group.rank == 0 else b""
    length = int(group.run(yield_request(AllGatherScalar(len(text))))[0])
    data = torch.tensor(list(text.ljust(length)), dtype=torch.uint8)
    group.run(yield_request(Broadcast(data)))
    return _parse(json.loads(bytes(data.tolist())))


def _read(path: Path) -> Times:
    try:
        return _parse(json.loads(path.read_text())["times"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # the file does not exist or is damaged: measure again
        return {}


def _parse(times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Times:
    """Convert the sizes, which are strings in JSON, to integers."""
    return {
        kind: {int(size): dict(seconds) for size, seconds in by_size.items()}
        for kind, by_size in times.items()
    }


def _write(path: Path, environment: Mapping[str, Any], times: Times) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, {**environment, "times": times})
    except OSError as error:
        warnings.warn(f"cannot write the times of collectives: {error}", stacklevel=2)
