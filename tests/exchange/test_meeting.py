import threading
import time

import pytest
from torch.distributed import HashStore

from gcnzc.exchange.meeting import met


def meet(store, ranks, world_size, timeout_s=10.0):
    """What each of some workers hears, or its error."""
    heard = {}

    def come(rank, delay_s):
        time.sleep(delay_s)
        try:
            heard[rank] = met(store, rank, world_size, timeout_s)
        except TimeoutError as error:
            heard[rank] = error

    threads = [threading.Thread(target=come, args=(rank, 0.1 * ((rank + 2) % 3))) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_every_round_has_a_name_of_its_own():
    store = HashStore()
    names = [meet(store, range(3), 3) for _ in range(3)]
    for heard in names:
        assert len(set(heard.values())) == 1
    assert len({heard[0] for heard in names}) == 3
    # another number of workers, on the same store
    assert len(set(meet(store, range(2), 2).values())) == 1


def test_who_comes_first_does_not_join_the_round_before():
    store = HashStore()
    before = meet(store, range(3), 3)[0]
    heard = {}
    early = [
        threading.Thread(target=lambda r=rank: heard.update({r: met(store, r, 3, 10.0)}))
        for rank in (1, 2)
    ]
    for thread in early:
        thread.start()
    time.sleep(0.5)
    assert not heard
    heard[0] = met(store, 0, 3, 10.0)
    for thread in early:
        thread.join()
    assert len(set(heard.values())) == 1
    assert heard[0] != before


def test_who_does_not_come_is_named():
    heard = meet(HashStore(), (0, 1, 3), 4, timeout_s=1.0)
    assert str(heard[0]) == "no sign of worker 2"
    assert str(heard[1]) == "no sign of worker 0"


def test_a_round_that_failed_does_not_spoil_the_next():
    store = HashStore()
    meet(store, (0, 1), 3, timeout_s=0.5)
    assert len(set(meet(store, range(3), 3).values())) == 1


@pytest.mark.parametrize("world_size", [1, 8])
def test_any_number(world_size):
    assert len(set(meet(HashStore(), range(world_size), world_size).values())) == 1
