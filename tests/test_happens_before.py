"""The happens-before checker itself: it reports races, and nothing else."""

import gc

import pytest
import torch
from checked_device import Device, Watch
from cooperative_threads import Channel, Deadlock, Deque, Executor, Lock, Schedule


@pytest.fixture
def device():
    gc.disable()
    device = Device(0)
    Schedule.active = device.schedule
    with Watch(device):
        yield device
    device.schedule.stop()
    Schedule.active = None
    gc.enable()


@pytest.fixture
def x(device):
    return device.memory(torch.zeros(8))


def kinds(device):
    """Return for each race what was done first and second, and its bytes."""
    races = device.races
    return [(r.first.split()[1], r.second.split()[1], r.begin, r.end) for r in races]


@pytest.mark.parametrize("kinds_", [("write", "read"), ("read", "write"), ("write", "write")])
def test_two_streams_need_an_event(device, x, kinds_):
    first, second = kinds_
    one, other = device.new(), device.new()
    one.do(getattr(device, first), x)
    done = one.record()
    other.do(getattr(device, second), x[2:])
    assert kinds(device) == [(first, second, 8, 32)]
    device.races.clear()
    other.wait(done)
    other.do(getattr(device, first), x)
    assert not device.races


def test_an_event_covers_the_work_before_it_only(device, x):
    one, other = device.new(), device.new()
    done = one.record()
    one.do(device.write, x)
    other.wait(done)
    other.do(device.read, x)
    assert kinds(device) == [("write", "read", 0, 32)]


def test_reads_and_other_bytes_need_no_event(device, x):
    one, other = device.new(), device.new()
    one.do(device.read, x)
    other.do(device.read, x)
    one.do(device.write, x[:2])
    assert kinds(device) == [("read", "write", 0, 8)]
    device.races.clear()
    other.do(device.write, x[2:])
    # the read of these bytes by the first stream
    assert kinds(device) == [("read", "write", 8, 32)]
    device.races.clear()
    one.do(device.read, x[:2])
    assert not device.races


def test_a_wait_orders_through_other_streams(device, x):
    one, two, three = device.new(), device.new(), device.new()
    one.do(device.write, x)
    two.wait(one.record())
    three.wait(two.record())
    three.do(device.read, x)
    assert not device.races


def test_the_host_comes_after_work_that_it_knows_to_be_done(device, x):
    stream = device.new()
    stream.do(device.write, x)
    done = stream.record()
    x.sum()
    assert kinds(device) == [("write", "read", 0, 32)]
    device.races.clear()
    while not done.is_done():
        pass
    x.sum()
    assert not device.races
    # and queued work after what the host did before
    x.fill_(1)
    stream.do(device.read, x)
    assert not device.races
    x.fill_(2)
    assert kinds(device) == [("read", "write", 0, 32)]


def test_operations_of_torch_read_and_write_their_arguments(device, x):
    one, other = device.new(), device.new()
    y, ids = device.memory(torch.zeros(8)), device.memory(torch.zeros(8, dtype=torch.int64))
    one.do(lambda: torch.index_select(x, 0, ids, out=y))
    for tensor in (x, y, ids):
        device.races.clear()
        other.do(device.read, tensor)
        assert bool(device.races) == (tensor is y)
    device.races.clear()
    z = device.memory(torch.zeros(8))
    one.do(lambda: z.view(2, 4)[:, 1:].add_(1))
    # which reads it, too
    assert not device.races
    other.do(lambda: z + 0)
    assert kinds(device) == [("write", "read", 4, 32)]


def test_memory_is_free_for_later_work_of_its_stream_only(device):
    owner, other = device.new(), device.new()
    memory = device.device_memory(64, owner)
    owner.do(device.write, memory)
    del memory
    assert not device.races
    memory = device.device_memory(64, owner)
    other.do(device.write, memory)
    owner.wait(other.record())
    del memory
    assert not device.races
    memory = device.device_memory(64, owner)
    other.do(device.write, memory)
    del memory
    (race,) = device.races
    assert race.second == f"a write by the next user on {owner.actor.name}"


def test_memory_of_the_host_is_free_at_once(device):
    stream = device.new()
    memory = device.host_memory(64)
    stream.do(device.read, memory)
    stream.record().synchronize()
    del memory
    assert not device.races
    memory = device.host_memory(64)
    stream.do(device.read, memory)
    del memory
    assert len(device.races) == 1


def in_threads(device, *works):
    """Run functions in threads; return the races."""
    device.races.clear()
    for number, work in enumerate(works):
        device.schedule.start(str(number), work)
    device.schedule.join_all()
    return device.races


def test_threads_are_ordered_by_what_they_share_and_not_by_chance(device, x):
    lock, queue, channel = Lock(), Deque(), Channel()

    def locked(access):
        with lock:
            access(x)

    def append():
        device.write(x)
        queue.append(1)

    def take():
        device.schedule.wait_until(lambda: queue)
        queue.popleft()
        device.read(x)

    def put():
        device.write(x)
        channel.put(1)

    def get():
        channel.get()
        device.read(x)

    write, read = (lambda: device.write(x)), (lambda: device.read(x))
    assert in_threads(device, write, read)
    assert not in_threads(device, lambda: locked(device.write), lambda: locked(device.read))
    assert not in_threads(device, append, take)
    assert not in_threads(device, put, get)
    # started after what this thread did, and joined before what it does next
    device.write(x)
    assert not in_threads(device, read)
    device.write(x)
    assert not device.races


def test_tasks_are_ordered_after_their_submission_and_before_their_result(device, x):
    executor = Executor(2)
    device.write(x)
    future = executor.submit(device.write, x)
    future.result()
    device.read(x)
    assert not device.races
    executor.submit(device.write, x)
    device.schedule.wait_until(lambda: not executor.queue)
    device.read(x)
    executor.shutdown()
    assert device.races


def test_a_deadlock_is_an_error(device):
    lock = Lock()
    with lock, pytest.raises(Deadlock):
        lock.acquire()
