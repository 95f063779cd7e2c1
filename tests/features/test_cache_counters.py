"""Counters of the feature cache on streams of a device: no access to a sum is unordered."""

import random
from types import SimpleNamespace

import torch
from cooperative_threads import Lock
from simulated_device import Factories, OnDevice
from simulated_nccl import Watch, nccl_group, replaced

from gcnzc.features import cache
from gcnzc.features.cache import Tally

NUM_SCHEDULES = 30


def count(seed, without=None):
    """Count on several streams in several threads, and read the sums in one; return the device."""
    draw = random.Random(f"program {seed}")
    with nccl_group(seed, without) as (device, _):
        current = lambda _: SimpleNamespace(cuda_stream=id(device.current()))  # noqa: E731
        streams = [device.new() for _ in range(draw.randint(1, 3))]
        with replaced(
            (cache, "ForkSafeLock", Lock),
            (torch.cuda, "current_stream", current),
            (torch.cuda, "synchronize", device.synchronize),
        ):
            tally, is_reset = Tally(), draw.random() < 0.3
            added = []

            def add(number):
                with Watch(device), Factories():
                    for _ in range(number):
                        hits = lambda: tally.add(5, OnDevice(torch.tensor(2)))  # noqa: E731
                        draw.choice(streams).do(hits)
                        added.append(2)

            for number in range(draw.randint(1, 3)):
                device.schedule.start(str(number), lambda: add(draw.randint(1, 4)))
            for _ in range(draw.randint(0, 3)):
                rows, hits = tally.read()
                assert rows * 2 == hits * 5
                if is_reset:
                    tally.reset()
            device.schedule.join_all()
            if not is_reset:
                assert tally.read() == (len(added) * 5, sum(added))
    return device


def test_sums_on_streams_are_complete_and_ordered():
    calls = set()
    for seed in range(NUM_SCHEDULES):
        device = count(seed)
        assert not device.races, f"{seed}: {device.races[0]}"
        calls |= device.calls
    # the one call that orders the host after all streams
    [call] = [call for call in calls if call[0] == "synchronize"]
    assert any(count(seed, call).races for seed in range(NUM_SCHEDULES))
