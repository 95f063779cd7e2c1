"""Measure collective algorithms on the ranks of a run, and keep the times in a file.

All workers time the same requests in turns and share their times, so that all choose alike.

Letters: R rounds, A algorithms.
"""

import hashlib
import json
import os
import random
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.choices import ALGORITHMS, Choices
from gcnzc.exchange.group import Group
from gcnzc.exchange.requests import (
    Algorithm,
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Collective,
    Request,
    Sum,
)
from gcnzc.exchange.tuner import KINDS, PIECES, SIZES, Times, Tuning, measure

HOST_BYTES = 64  # of a machine's name


def tune(
    group: Group,
    folder: Path,
    sizes: Mapping[str, Sequence[int]] | None = None,
    *,
    budget_s: float = 60.0,
    again: bool = False,
) -> Tuning:
    """What was measured on these workers, after measuring what is missing of it.

    All workers must call this together, with the same arguments. Nothing is measured over NCCL,
    which chooses by itself, or for one worker. What is sent while measuring counts in the group's
    ledger.

    Args:
        group: whose `choices` stay as they are.
        folder: where times are kept; only worker 0's is used, and made if need be.
        sizes: the bytes that will be asked for, of each kind in `KINDS`; all kinds with `SIZES` if
            None.
        budget_s: what measuring takes at most, about. Larger sizes are left out first, and are not
            tried again next time.
        again: measure anew what is asked for.

    Raises:
        ValueError: a kind has no algorithms to choose from.
        WorkerLost: another worker did not answer in time, or is gone.
    """
    wanted = dict.fromkeys(KINDS, SIZES) if sizes is None else sizes
    for kind in wanted:
        if kind not in KINDS:
            raise ValueError(f"no choice for {kind}\n\nhint: there is one for {', '.join(KINDS)}")
    if group.world_size == 1 or group.backend == "nccl":
        return Tuning({})
    made_for = _made_for(group)
    digest = hashlib.sha256(json.dumps(made_for).encode()).hexdigest()
    path = folder / f"collectives-{digest[:16]}.json"
    found = _shared(group, path)
    known = {} if again else found
    missing = {kind: sorted({*wanted[kind]} - {*known.get(kind, {})}) for kind in wanted}
    missing = {kind: of_kind for kind, of_kind in missing.items() if of_kind}
    if not missing:
        return Tuning(found)
    new = measure(lambda *case: _least(group, *case), missing, group.world_size, budget_s)
    group.forget_buffers()
    for kind, by_size in new.items():
        found[kind] = found.get(kind, {}) | by_size
    if group.rank == 0:
        _keep(path, made_for, found)
    return Tuning(found)


def request_of(kind: str, num_bytes: int, rank: int, world_size: int) -> Collective:
    """A request that is about so many bytes, of zeros."""
    values = torch.zeros(num_bytes, dtype=torch.uint8)
    if kind == "Sum":
        return Sum(torch.zeros(max(num_bytes // 4, 1)))
    if kind == "AllGather":
        return AllGather(values)
    if kind == "Broadcast":
        return Broadcast(values)
    assert kind == "AllToAll", "all kinds with a choice"
    parts = values.tensor_split(world_size)
    return AllToAll(parts, [len(parts[rank])] * world_size)


def timed(group: Group, kind: str, num_bytes: int, names: Sequence[str], rounds: int) -> Tensor:
    """Time algorithms in turns on all workers, after a first round that is not counted.

    Returns:
        (R, A) float64, the same on all workers: seconds of the slowest one. Each algorithm began
        when everybody had voted.
    """
    request = request_of(kind, num_bytes, group.rank, group.world_size)
    seconds = torch.empty(1 + rounds, len(names), dtype=torch.float64)
    usual, shuffler = group.choices, random.Random(0)
    try:
        for turn in range(1 + rounds):
            for place in shuffler.sample(range(len(names)), len(names)):
                group.choices = Choices.always(**{kind: names[place]})
                group.run(ask(AllGatherScalar(0)))
                begin = time.perf_counter()
                group.run(ask(request))
                seconds[turn, place] = time.perf_counter() - begin
    finally:
        group.choices = usual
    everybodys = group.run(ask(AllGather(seconds[1:].flatten())))
    return everybodys.amax(0).view(rounds, len(names))


def ask(request: Request) -> Algorithm[Any]:
    """An algorithm that asks for one thing, and returns the answer."""
    return (yield request)


def _least(
    group: Group, kind: str, num_bytes: int, names: Sequence[str], rounds: int
) -> tuple[list[float], float]:
    begin = time.perf_counter()
    seconds = timed(group, kind, num_bytes, names, rounds)
    # others' load only ever adds to a time
    return seconds.amin(0).tolist(), max(
        group.run(ask(AllGatherScalar(time.perf_counter() - begin)))
    )


def _made_for(group: Group) -> dict[str, Any]:
    """What times depend on."""
    host = torch.zeros(HOST_BYTES, dtype=torch.uint8)
    name = socket.gethostname().encode()[:HOST_BYTES]
    host[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
    return {
        "backend": group.backend,
        "hosts": [
            bytes(each.tolist()).rstrip(b"\0").decode() for each in group.run(ask(AllGather(host)))
        ],
        "torch": torch.__version__,
        "algorithms": {kind: ALGORITHMS[kind] for kind in KINDS},
        "pieces": PIECES,
    }


def _shared(group: Group, path: Path) -> Times:
    """What worker 0 finds in a file, on all workers."""
    text = json.dumps(_read(path)).encode() if group.rank == 0 else b""
    length = int(group.run(ask(AllGatherScalar(len(text))))[0])
    data = torch.tensor(list(text.ljust(length)), dtype=torch.uint8)
    group.run(ask(Broadcast(data)))
    return _times(json.loads(bytes(data.tolist())))


def _read(path: Path) -> Times:
    try:
        return _times(json.loads(path.read_text())["times"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # not there, or damaged: it is made again
        return {}


def _times(words: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Times:
    return {
        kind: {int(size): dict(seconds) for size, seconds in by_size.items()}
        for kind, by_size in words.items()
    }


def _keep(path: Path, made_for: Mapping[str, Any], times: Times) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({**made_for, "times": times}, indent=1) + "\n")
        os.replace(partial, path)
    except OSError as error:
        warnings.warn(f"times of collectives are not kept: {error}", stacklevel=2)
