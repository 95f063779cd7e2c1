"""What every way of taking means promises."""

import io

import pytest
import torch
from compress.ways import (
    CODES,
    DENSE,
    FEEDBACK,
    FEW,
    WAYS,
    are_same,
    as_worker,
    attempt,
    errors_of,
    masked,
    mean_of,
    pending,
    reducers,
    steps_of,
    vectors,
)
from processes import results

from gcnzc.compress import Rounded
from gcnzc.exchange import Choices, lockstep
from gcnzc.optim import resize_state

# of the vector, and how many workers; each length meets few and many workers
SIZES = [(0, 2), (1, 1), (1, 9), (31, 3), (33, 2), (33, 4), (100, 7), (1000, 5), (1000, 2)]
SIZES += [(257, 8), (500, 6), (4097, 1)]
DTYPES = [torch.float32, torch.float64]
# of the largest element, in each step: a rounding of float32
ROUNDING = 6e-8


def some_sizes(way):
    """A third of the sizes: all of them meet some ways of a kind."""
    return SIZES[list(WAYS).index(way) % 3 :: 3]


def exact_mean(given, num_elements):
    return torch.stack(given)[:, :num_elements].double().mean(dim=0)


@pytest.mark.parametrize("way", WAYS)
def test_workers_end_with_the_same_bits_and_the_sums_of_notes(way):
    for (count, world_size), dtype in zip(some_sizes(way), DTYPES * 2, strict=True):
        notes = count % 4
        them = reducers(WAYS[way], count, world_size, dtype)
        for step in range(2):
            given = vectors(count + notes, world_size, step, dtype)
            for rank, vector in enumerate(given):
                vector[count:] = torch.tensor([1.0, rank, rank % 2])[:notes]
            sums = torch.stack(given)[:, count:].sum(dim=0)
            found = mean_of(them, given, notes)
            assert torch.equal(found[0][count:], sums), (count, world_size)
            assert all(torch.equal(each, found[0]) for each in found), (count, world_size)
            assert bool(found[0].isfinite().all())
            if world_size == 1:
                assert torch.equal(found[0], given[0])


@pytest.mark.parametrize("way", CODES)
def test_bytes_and_collectives_are_as_stated(way):
    for (count, world_size), notes in zip(some_sizes(way), [0, 3, 1, 2], strict=True):
        them = reducers(WAYS[way], count, world_size)
        outcome, _ = attempt(them, vectors(count + notes, world_size), notes)
        expected = WAYS[way].bytes_sent(count, world_size, notes)
        for ledger in outcome.ledgers:
            assert ledger.bytes_sent == expected, (count, world_size)
            assert ledger.requests == (2 if world_size > 1 else 0)


@pytest.mark.parametrize("way", DENSE)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_bytes_of_dense_means_are_those_of_a_ring(way, world_size):
    count = 24 * world_size - 3
    given = vectors(count + 3, world_size)
    outcome = lockstep(
        [
            each.mean(vector, 3)
            for each, vector in zip(reducers(WAYS[way], count, world_size), given, strict=True)
        ],
        choices=Choices.always(Sum="ring"),
    )
    for ledger in outcome.ledgers:
        assert ledger.bytes_sent == WAYS[way].bytes_sent(count, world_size, 3)
        assert ledger.requests == (1 if world_size > 1 else 0)


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_bytes_of_codes_are_near_their_bits(world_size):
    count, dense = 2**20, WAYS["dense"].bytes_sent(2**20, world_size)
    for way, bits in {"sign": 1, "int8": 8, "int4": 4, "rounded": 16, "dense bfloat16": 16}.items():
        # of a scale every 4096, or every 256
        most = bits + 32 / (4096 if bits == 1 else 256) + 0.01
        sent = WAYS[way].bytes_sent(count, world_size)
        assert bits / 32 <= sent / dense <= most / 32, way
    # of both rounds, with a scale every 32, and every 64
    mixed = {"int4, then bfloat16": 4 + 1 + 16, "float8_e5m2, then int4": 8 + 0.5 + 4 + 0.5}
    for way, bits in mixed.items():
        sent = WAYS[way].bytes_sent(count, world_size)
        assert sent / dense == pytest.approx(bits / 2 / 32, rel=1e-3), way


@pytest.mark.parametrize("way", FEEDBACK)
def test_nothing_is_lost_of_what_workers_give(way):
    # many workers for some ways, few for others
    more = list(WAYS).index(way) % 4
    sizes = [(33, 2), (1000, 3 + more), (100, 9 - more)]
    for (count, world_size), dtype in zip(sizes, [torch.float32, *DTYPES], strict=True):
        them = reducers(WAYS[way], count, world_size, dtype)
        given_out, put_in = 0, 0
        largest = 0
        for step in range(5):
            given = vectors(count, world_size, step, dtype)
            found = mean_of(them, given)
            given_out = given_out + found[0].double()
            put_in = put_in + exact_mean(given, count)
            largest = max(largest, *(float(vector.abs().max()) for vector in given))
        room = ROUNDING * largest * 5
        left = (given_out + pending(them) - put_in).abs().max()
        assert left <= room, (count, world_size)
        # and there was something to lose
        assert pending(them).abs().max() > 10 * room


@pytest.mark.parametrize("way", FEEDBACK)
def test_what_is_left_out_stays_small(way):
    """Errors come to a stand, instead of growing with every step."""
    count, world_size, left = 300, 2, []
    them = reducers(WAYS[way], count, world_size)
    for step in range(30):
        given = [vector.clamp(-3, 3) for vector in vectors(count, world_size, step)]
        mean_of(them, given)
        left.append(pending(them).norm() / count**0.5)
    assert max(left[15:]) < 2 * max(left[:15])
    assert max(left) < 10


@pytest.mark.parametrize("way", WAYS)
def test_inactive_elements_have_no_mean_no_error_and_no_part_in_scales(way):
    for (count, world_size), dtype in zip([(1000, 3), (65, 2), (40, 1)], DTYPES * 2, strict=False):
        active = masked(count)
        loud, quiet = (reducers(WAYS[way], count, world_size, dtype) for _ in range(2))
        for each in loud + quiet:
            each.keep_to(active)
        for step in range(3):
            given = vectors(count + 1, world_size, step, dtype)
            silent = [vector.clone() for vector in given]
            for vector in silent:
                vector[:count][~active] = 0
            for vector, noise in zip(given, (1e30, torch.inf, torch.nan), strict=False):
                vector[:count][~active] = noise
            found, expected = mean_of(loud, given, 1), mean_of(quiet, silent, 1)
            assert torch.equal(found[0], expected[0])
            assert found[0][:count][active].any()
            assert not found[0][:count][~active].any()
        assert are_same(errors_of(loud), errors_of(quiet))
        for each in loud:
            if each.worker_error is not None:
                assert not each.worker_error[~active].any()
                begin, end = each.part
                assert not each.server_error[~active[begin:end]].any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [3, 8])
def test_with_nothing_active_all_is_zero(way, world_size):
    them = reducers(WAYS[way], 100, world_size)
    for each in them:
        each.keep_to(torch.zeros(100, dtype=torch.bool))
    found = mean_of(them, vectors(102, world_size), 2)
    assert not found[0][:100].any()
    assert found[0][100:].any()


@pytest.mark.parametrize("way", FEEDBACK)
def test_elements_that_are_given_up_are_forgotten_and_no_others(way):
    count, world_size = 700, 4
    active = masked(count)
    them = reducers(WAYS[way], count, world_size)
    for step in range(2):
        mean_of(them, vectors(count, world_size, step))
    before = pending(them)
    for each in them:
        each.keep_to(active)
    assert torch.equal(pending(them), torch.where(active, before, 0))
    given_out, put_in = 0, before * active
    for step in range(2, 5):
        given = vectors(count, world_size, step)
        given_out = given_out + mean_of(them, given)[0].double()
        put_in = put_in + exact_mean(given, count) * active
    room = ROUNDING * max(vector.abs().max() for vector in given) * 10
    assert (given_out + pending(them) - put_in).abs().max() <= room
    for each in them:
        each.keep_to(None)
    found = mean_of(them, vectors(count, world_size, 9))
    assert found[0][~active].any()


@pytest.mark.parametrize("way", WAYS)
def test_zeros_have_the_mean_zero(way):
    for count, world_size in [(100, 1), (1000, 3)]:
        them = reducers(WAYS[way], count, world_size)
        for _ in range(2):
            found = mean_of(them, [torch.zeros(count) for _ in them])
            assert not any(vector.any() for vector in found)
        for each in them:
            assert not any(each.errors()[name].any() for name in each.errors() if name != "means")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_blamed_on_its_worker_and_leaves_no_trace(way, bad):
    for count, world_size in [(100, 1), (700, 3)]:
        them, others = (reducers(WAYS[way], count, world_size) for _ in range(2))
        first = vectors(count + 1, world_size)
        mean_of(them, first, 1), mean_of(others, first, 1)
        culprit = world_size - 1
        for places in ([0], [3, 99], list(range(count))):
            given = vectors(count + 1, world_size, 1)
            given[culprit][places] = bad
            outcome, _ = attempt(them, given, 1)
            assert (
                outcome.results
                == [f"elements that are not finite: worker {culprit} has {len(places)}"]
                * world_size
            )
            assert are_same(errors_of(them), errors_of(others))
        last = vectors(count + 1, world_size, 2)
        assert torch.equal(mean_of(them, last, 1)[0], mean_of(others, last, 1)[0])
        assert are_same(errors_of(them), errors_of(others))


@pytest.mark.parametrize("way", WAYS)
def test_all_culprits_are_named_and_notes_are_looked_at(way):
    given = vectors(52, 3)
    given[0][5], given[2][:2] = torch.nan, torch.inf
    them = reducers(WAYS[way], 50, 3)
    assert (
        attempt(them, given, 2)[0].results
        == ["elements that are not finite: worker 0 has 1, worker 2 has 2"] * 3
    )
    given = vectors(52, 3)
    given[1][51] = torch.nan
    assert (
        attempt(them, given, 2)[0].results == ["elements that are not finite: worker 1 has 1"] * 3
    )
    mean_of(them, vectors(52, 3), 2)


@pytest.mark.parametrize("way", FEW)
def test_inactive_elements_are_not_counted_among_the_bad(way):
    active = masked(60)
    them = reducers(WAYS[way], 60, 2)
    for each in them:
        each.keep_to(active)
    given = vectors(60, 2)
    for vector in given:
        vector[~active] = torch.nan
    given[1][int(active.nonzero()[4])] = torch.inf
    outcome, _ = attempt(them, given)
    assert outcome.results == ["elements that are not finite: worker 1 has 1"] * 2


@pytest.mark.parametrize("way", ["dense", "rounded float32", "int8", "int4, then bfloat16"])
def test_a_sum_that_overflows_is_blamed_and_leaves_no_trace(way):
    them, others = (reducers(WAYS[way], 200, 3) for _ in range(2))
    first = vectors(200, 3)
    mean_of(them, first), mean_of(others, first)
    outcome, _ = attempt(them, [torch.full((200,), 2e38)] * 3)
    assert outcome.results == ["the mean overflows"] * 3
    assert are_same(errors_of(them), errors_of(others))
    assert torch.equal(mean_of(them, first)[0], mean_of(others, first)[0])


@pytest.mark.parametrize("way", FEEDBACK)
def test_an_element_that_overflows_with_its_error_is_blamed(way):
    them = reducers(WAYS[way], 64, 2)
    them[1].worker_error.fill_(3e38)
    before = errors_of(them)
    outcome, _ = attempt(them, [torch.full((64,), 1.0), torch.full((64,), 3e38)])
    (skip_reason,) = set(outcome.results)
    assert skip_reason.startswith("elements that are not finite: worker 1 has")
    assert are_same(errors_of(them), before)


def test_float16_overflows_where_float32_does_not():
    given = [torch.full((10,), 40_000.0), torch.full((10,), 30_000.0)]
    for way in ("dense", "rounded without errors"):
        assert mean_of(reducers(WAYS[way], 10, 2), given)[0][0] == pytest.approx(35_000, rel=2**-7)
    # the elements are finite, their sum is not
    blames = attempt(reducers(WAYS["dense float16"], 10, 2), given)[0].results
    assert blames == ["the mean overflows"] * 2
    # their sum is taken in float32
    them = reducers(Rounded(torch.float16), 10, 2)
    assert torch.equal(mean_of(them, given)[0], torch.full((10,), 35_000.0).half().float())
    given[1][4] = 70_000
    blames = attempt(them, given)[0].results
    assert blames == ["elements that are not finite: worker 1 has 1"] * 2


@pytest.mark.parametrize("way", CODES)
def test_errors_survive_a_checkpoint_and_the_means_go_on(way):
    count, world_size = 400, 3
    them, fresh = (reducers(WAYS[way], count, world_size) for _ in range(2))
    for step in range(3):
        mean_of(them, vectors(count, world_size, step))
    file = io.BytesIO()
    torch.save([each.errors() for each in them], file)
    file.seek(0)
    resumed = reducers(WAYS[way], count, world_size)
    for each, errors in zip(resumed, torch.load(file, weights_only=True), strict=True):
        each.load_errors(errors)
    given = vectors(count, world_size, 3)
    found = mean_of(resumed, given)[0]
    assert torch.equal(found, mean_of(them, given)[0])
    assert are_same(errors_of(resumed), errors_of(them))
    # what was kept matters
    has_state = way in FEEDBACK or "random" in way
    assert torch.equal(found, mean_of(fresh, given)[0]) == (not has_state)
    assert them[0].state_bytes == sum(
        error.numel() * error.element_size() for error in them[0].errors().values()
    )


@pytest.mark.parametrize("way", ["sign of 32", "int4 at random", "int4 at random without errors"])
def test_another_number_of_workers_goes_on_without_loss(way):
    count, given_out, put_in = 333, 0, 0
    them = reducers(WAYS[way], count, 3)
    for number, world_size in enumerate((3, 2, 1, 5)):
        if number:
            states = [
                {
                    "rank": rank,
                    "world_size": len(them),
                    "shared": {},
                    "local": {},
                    "shards": {},
                    "errors": {"momentum": each.errors()},
                }
                for rank, each in enumerate(them)
            ]
            if world_size == 1 and way in FEEDBACK:
                # what one worker's own vector cannot bring
                put_in = put_in - pending(them)
            them = reducers(WAYS[way], count, world_size)
            for rank, each in enumerate(them):
                each.load_errors(resize_state(states, rank, world_size)["errors"]["momentum"])
        for step in range(2):
            given = vectors(count, world_size, step)
            given_out = given_out + mean_of(them, given)[0].double()
            put_in = put_in + exact_mean(given, count)
    if way in FEEDBACK:
        assert (given_out + pending(them) - put_in).abs().max() <= 1e-4
    if "random" in way:
        # none with one worker alone
        assert [each.means for each in them] == [6] * 5


def test_errors_of_another_vector_are_refused():
    sign, plain = WAYS["sign"], WAYS["int8 without errors"]
    kept = reducers(sign, 100, 2)[-1].errors()
    for way, count, world_size in [(sign, 101, 2), (sign, 100, 3), (plain, 100, 2)]:
        with pytest.raises(ValueError, match=r"(?s)errors of shapes .*hint: .*resized"):
            reducers(way, count, world_size)[-1].load_errors(kept)
    # of somebody who left nothing out
    reducer = reducers(sign, 100, 2)[0]
    reducer.worker_error.fill_(1)
    reducer.load_errors({})
    assert not reducer.worker_error.any()


@pytest.mark.parametrize("way", FEEDBACK)
def test_forgotten_errors_are_zero(way):
    them = reducers(WAYS[way], 100, 2)
    mean_of(them, vectors(100, 2))
    for each in them:
        each.forget()
    assert not pending(them).any()


def test_over_processes_as_in_lockstep(tmp_path):
    # of the longer ones torch's own collectives take the rows
    lengths = {333: list(WAYS), 300_000: ["sign", "int8", "int4, then bfloat16"]}
    outcome = lockstep([steps_of(rank, 2, lengths) for rank in range(2)])
    for (found, sent), expected, ledger in zip(
        results(2, tmp_path, as_worker, lengths), outcome.results, outcome.ledgers, strict=True
    ):
        assert len(found) == len(expected) > 2 * len(WAYS)
        assert all(map(torch.equal, found, expected))
        assert sent == pytest.approx(ledger.bytes_sent, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("way", FEW)
def test_on_a_gpu_as_on_the_cpu(way, device):
    count, world_size = 5000, 3
    here = reducers(WAYS[way], count, world_size)
    there = reducers(WAYS[way], count, world_size, device=device)
    for step in range(3):
        given = vectors(count + 2, world_size, step)
        expected = mean_of(here, given, 2)
        found = mean_of(there, [vector.to(device) for vector in given], 2)
        # scales of signs are sums, whose order is the device's
        room = 1e-5 if way.startswith("sign") else 1e-6
        torch.testing.assert_close(found[0].cpu(), expected[0], rtol=room, atol=1e-6)
        assert all(torch.equal(each, found[0]) for each in found)
