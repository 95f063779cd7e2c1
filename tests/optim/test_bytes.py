"""Each method sends the bytes of its formula, in a fixed number of collectives."""

import math

import pytest
import torch
from collective_sizes import lockstep_by
from optim import teams
from optim.methods import CASES, METHODS

from gcnzc.compress import Blocks, Dense, Sign


def count_of(model):
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def steps_of(model, optimizer, end, begin=0):
    """Steps in which all elements have gradients."""
    for step in range(begin, end):
        teams.set_noise(model, 10 * step + optimizer.group.rank)
        yield from optimizer.algorithm()


def ledgers_of(name, world_size, steps, begin=0, **options):
    """The ledgers of ranks over some steps, the first optimizer, and the number of elements."""
    models, optimizers = CASES[name].team(world_size, **options)
    teams.broadcast(optimizers)
    lockstep_by("builtin", teams.of_ranks(steps_of, models, optimizers, begin))
    found = lockstep_by("builtin", teams.of_ranks(steps_of, models, optimizers, steps, begin))
    teams.finish_pending(optimizers)
    return found.ledgers, optimizers[0], count_of(models[0])


# --- in every step


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize(
    ("name", "options", "requests"),
    [
        *((name, {}, {}) for name in ("onebit-adam", "onebit-lamb", "zero-one-adam local steps")),
        ("onebit-adam of vectors", {}, {"Sum": 1}),
        ("onebit-adam", {"clip_norm": 1.0}, {"AllGather": 2}),
    ],
)
def test_a_compressed_step_sends_signs_in_two_collectives(name, options, requests, world_size):
    ledgers, optimizer, _ = ledgers_of(name, world_size, 4, 3, **options)
    groups = [group for group in optimizer.param_groups if group["compress"]]
    count = sum(each.numel() for group in groups for each in group["params"] if each.requires_grad)
    sent = Sign().bytes_sent(count, world_size, extras=2)
    # the squared norm of a rank's gradient, float64, for each other rank
    sent += 8 * (world_size - 1) * len(options)
    for ledger in ledgers:
        found = {kind: entry.requests for kind, entry in ledger.entries.items()}
        assert found == {"AllToAll": 1, "AllGather": 1} | requests
        assert sum(ledger.entries[kind].bytes_sent for kind in ("AllToAll", "AllGather")) == sent


def test_local_steps_of_0_1_adam_send_nothing():
    ledgers, _, _ = ledgers_of("zero-one-adam local steps", 3, 7, 4)
    assert [ledger.bytes_sent for ledger in ledgers] == [0] * 3


@pytest.mark.parametrize("compress", [None, Dense(torch.float16)], ids=["plain", "half"])
@pytest.mark.parametrize(("name", "numbers"), [("averaged", 0), ("drop-compute", 2)])
def test_flags_and_numbers_are_sent_with_the_gradients(name, numbers, compress):
    ledgers, optimizer, count = ledgers_of(name, 4, 6, 1, signals=2, compress=compress)
    num_parameters = sum(each.requires_grad for each in optimizer.param_groups[0]["params"])
    # a flag for each parameter, the hash bit, the signals, and the counts of DropCompute
    elements = count + num_parameters + 1 + 2 + numbers
    for ledger in ledgers:
        stated = 5 * (compress or Dense()).bytes_sent(elements, 4)
        # the parts of the ring differ by an element
        assert abs(ledger.bytes_sent - stated) <= 5 * 6 * 4
        assert ledger.requests == 5


# --- of local methods


def sent_by_exchange(name, optimizer, count, world_size):
    """The bytes that a rank sends for a mean of all elements, by formula."""
    others = world_size - 1
    layers = [each.numel() for each in optimizer.param_groups[0]["params"] if each.requires_grad]
    sent = optimizer.compress.bytes_sent(count, world_size, optimizer.extras, layers)
    is_co2 = name.startswith("co2")
    if "sharded" in name or name == "co2 at once":
        # the anchor, of CO2 with the distance
        share = -(-count // world_size)
        return sent + others * 4 * (share + -share % 32 + is_co2)
    has_gap = is_co2 and "eager" not in name and name != "co2"
    return sent + 8 * others * has_gap


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        *(("local-sgd", 1), ("local-sgd half", 1), ("local-sgd sign", 2)),
        *(("diloco", 1), ("diloco half", 1), ("diloco sign", 2)),
        # of a shard: its extras, the mean, and the anchor
        ("diloco sharded", 3),
        *(("co2 eager", 1), ("co2 eager sign", 2), ("co2 eager sharded", 3)),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_exchange_sends_the_bytes_of_its_formula(name, requests, world_size):
    ledgers, optimizer, count = ledgers_of(name, world_size, 9, signals=2)
    for ledger in ledgers:
        assert ledger.requests == 2 * requests
        stated = 2 * sent_by_exchange(name, optimizer, count, world_size)
        # parts of a ring differ by an element
        assert abs(ledger.bytes_sent - stated) <= 2 * 2 * world_size * 4


@pytest.mark.parametrize("name", ["streaming half", "streaming sign", "streaming topk"])
def test_each_fragment_is_sent_once_in_a_window(name):
    world_size, steps = 3, 13
    ledgers, optimizer, _ = ledgers_of(name, world_size, steps)
    sizes = [each.num_elements for each in optimizer.fragments]
    num_fragments, stated, exchanges = len(sizes), 0, 0
    for number, size in enumerate(sizes):
        first = round(number * 4 / num_fragments)
        count = sum(step > first and (step - first) % 4 == 0 for step in range(1, steps + 1))
        exchanges += count
        if name != "streaming topk":
            stated += count * optimizer.compress.bytes_sent(size, world_size, optimizer.extras)
    for ledger in ledgers:
        assert ledger.requests == exchanges * (2 if "sign" in name else 1)
        if stated:
            assert abs(ledger.bytes_sent - stated) <= exchanges * 2 * world_size * 4


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("threshold", [0.0, math.inf])
def test_selsync_sends_votes_and_means(world_size, threshold):
    ledgers, optimizer, count = ledgers_of("selsync", world_size, 10, 3, threshold=threshold)
    means = 7 * (threshold == 0)
    assert optimizer.num_exchanges == (2 if threshold else 10)
    # a vote and a bit of 8 bytes
    stated = 7 * 2 * (world_size - 1) * 2 * 8 / world_size
    stated += means * sent_by_exchange("selsync", optimizer, count, world_size)
    for ledger in ledgers:
        # parts of a ring differ by an element
        assert abs(ledger.bytes_sent - stated) <= 7 * 16 * (world_size > 2) + means * 8 * world_size
        assert ledger.requests == 7 + means


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("options", "vectors"), [({}, 2), ({"round_weight": 1}, 1)])
def test_a_round_of_fedglomo_sends_compressed_vectors(world_size, options, vectors):
    codec = Blocks("int8", stochastic=True)
    for participants in (None, 1):
        own = options if participants is None else options | {"participants": participants}
        ledgers, optimizer, count = ledgers_of("fedglomo", world_size, 8, 4, local_steps=4, **own)
        # nobody sends less than the participants do; the other entries are those of comparisons
        for ledger in ledgers:
            sent = sum(ledger.entries[kind].bytes_sent for kind in ("AllToAll", "AllGather"))
            assert sent == codec.bytes_sent(vectors * count, world_size, optimizer.extras)


# --- in pairs


@pytest.mark.parametrize("world_size", [2, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saps_sends_a_share_of_the_elements_to_one_peer(world_size, dtype):
    models, optimizers = METHODS["saps"].team(world_size, dtype, density=0.1, control_interval=100)
    teams.broadcast(optimizers)
    idle = 0
    for rows in teams.batches(2 * world_size):
        for pair in zip(models, optimizers, strict=True):
            teams.set_gradients(*pair, rows)
        found = teams.step_all(optimizers)
        matched = {rank for edge in optimizers[0].pairs for rank in edge}
        idle += world_size - len(matched)
        for rank, ledger in enumerate(found.ledgers):
            stated = dtype.itemsize * round(0.1 * count_of(models[0]))
            assert ledger.bytes_sent == (stated if rank in matched else 0)
    # in turn
    assert idle == (2 * world_size if world_size % 2 else 0)
