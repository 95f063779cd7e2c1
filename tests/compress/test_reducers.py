"""Properties that the reducers of all compressions have."""

import io

import pytest
import torch
from compress import cases
from processes import results

from gcnzc.exchange import lockstep
from gcnzc.optim import resize_state

# lengths of the vector and numbers of ranks; each length has few and many ranks
SIZES = [(0, 2), (1, 1), (1, 9), (31, 3), (33, 2), (33, 4), (100, 7), (1000, 5), (1000, 2)]
SIZES += [(257, 8), (500, 6), (4097, 1)]
DTYPES = [torch.float32, torch.float64]
# rounding error of float32 in each step, relative to the largest element
ROUNDING = 6e-8
BAD = "elements that are not finite or too large:"


def some_sizes(name):
    """Return a third of the sizes, so that each size is tested with some compressions."""
    return SIZES[list(cases.ALL).index(name) % 3 :: 3]


def exact_mean(given, num_elements):
    return torch.stack(given)[:, :num_elements].double().mean(dim=0)


@pytest.mark.parametrize("name", cases.ALL)
def test_all_ranks_get_the_same_mean_bit_for_bit_and_the_sums_of_extras(name):
    for (count, world_size), dtype in zip(some_sizes(name), DTYPES * 2, strict=True):
        extras = count % 4
        them = cases.reducers(cases.ALL[name], count, world_size, dtype)
        for step in range(2):
            given = cases.vectors(count + extras, world_size, step, dtype)
            for rank, vector in enumerate(given):
                vector[count:] = torch.tensor([1.0, rank, rank % 2])[:extras]
            sums = torch.stack(given)[:, count:].sum(dim=0)
            found = cases.mean_of(them, given, extras)
            assert torch.equal(found[0][count:], sums), (count, world_size)
            assert all(torch.equal(each, found[0]) for each in found), (count, world_size)
            assert bool(found[0].isfinite().all())
            if world_size == 1:
                assert torch.equal(found[0], given[0])


GATHERED = [name for name in cases.SPARSE if name.startswith(("topk", "sparseloco", "randomk d"))]


@pytest.mark.parametrize("name", [*cases.CODES, *GATHERED])
def test_bytes_sent_and_number_of_collectives_match_the_formula(name):
    for (count, world_size), extras in zip(some_sizes(name), [0, 3, 1, 2], strict=True):
        layers = (count // 3, 0, count - count // 3)
        them = cases.reducers(cases.ALL[name], count, world_size, layers=layers)
        outcome, _ = cases.attempt(them, cases.vectors(count + extras, world_size), extras)
        expected = cases.ALL[name].bytes_sent(count, world_size, extras, layers)
        for ledger in outcome.ledgers:
            assert ledger.bytes_sent == expected, (count, world_size)
            assert ledger.requests == (world_size > 1) * (2 if name in cases.CODES else 1)


@pytest.mark.parametrize("name", [*cases.FEEDBACK, *cases.NO_DECAY])
def test_sums_of_means_and_errors_equal_sums_of_vectors(name):
    # many ranks for some compressions, few for others
    more = list(cases.ALL).index(name) % 4
    sizes = [(33, 2), (1000, 3 + more), (100, 9 - more)]
    for (count, world_size), dtype in zip(sizes, [torch.float32, *DTYPES], strict=True):
        them = cases.reducers(cases.ALL[name], count, world_size, dtype)
        sum_of_means, sum_of_vectors = 0, 0
        largest = 0
        for step in range(5):
            given = cases.vectors(count, world_size, step, dtype)
            found = cases.mean_of(them, given)
            sum_of_means = sum_of_means + found[0].double()
            sum_of_vectors = sum_of_vectors + exact_mean(given, count)
            largest = max(largest, *(float(vector.abs().max()) for vector in given))
        room = ROUNDING * largest * 5
        left = (sum_of_means + cases.pending(them) - sum_of_vectors).abs().max()
        assert left <= room, (count, world_size)
        # the errors are not zero anyway
        assert cases.pending(them).abs().max() > 10 * room


@pytest.mark.parametrize("name", cases.ALL)
def test_inactive_elements_have_no_mean_no_error_and_no_part_in_scales(name):
    for (count, world_size), dtype in zip([(1000, 3), (65, 2), (40, 1)], DTYPES * 2, strict=False):
        active = cases.masked(count)
        loud, quiet = (cases.reducers(cases.ALL[name], count, world_size, dtype) for _ in range(2))
        for each in loud + quiet:
            each.restrict_to(active)
        for step in range(3):
            given = cases.vectors(count + 1, world_size, step, dtype)
            silent = [vector.clone() for vector in given]
            for vector in silent:
                vector[:count][~active] = 0
            for vector, noise in zip(given, (1e30, torch.inf, torch.nan), strict=False):
                vector[:count][~active] = noise
            found, expected = cases.mean_of(loud, given, 1), cases.mean_of(quiet, silent, 1)
            assert torch.equal(found[0], expected[0])
            assert found[0][:count][active].any()
            assert not found[0][:count][~active].any()
        assert cases.are_same(cases.errors_of(loud), cases.errors_of(quiet))
        for each in loud:
            if each.worker_error is not None:
                assert not each.worker_error[~active].any()
            if each.server_error is not None:
                begin, end = each.part
                assert not each.server_error[~active[begin:end]].any()


@pytest.mark.parametrize("name", [*cases.FEEDBACK, *cases.NO_DECAY])
def test_restriction_clears_the_errors_of_inactive_elements_only(name):
    count, world_size = 700, 4
    active = cases.masked(count)
    them = cases.reducers(cases.ALL[name], count, world_size)
    for step in range(2):
        cases.mean_of(them, cases.vectors(count, world_size, step))
    before = cases.pending(them)
    for each in them:
        each.restrict_to(active)
    assert torch.equal(cases.pending(them), torch.where(active, before, 0))
    sum_of_means, sum_of_vectors = 0, before * active
    for step in range(2, 5):
        given = cases.vectors(count, world_size, step)
        sum_of_means = sum_of_means + cases.mean_of(them, given)[0].double()
        sum_of_vectors = sum_of_vectors + exact_mean(given, count) * active
    room = ROUNDING * max(vector.abs().max() for vector in given) * 10
    assert (sum_of_means + cases.pending(them) - sum_of_vectors).abs().max() <= room
    for each in them:
        each.restrict_to(None)
    found = cases.mean_of(them, cases.vectors(count, world_size, 9))
    assert found[0][~active].any()


@pytest.mark.parametrize("name", cases.ALL)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_non_finite_elements_are_reported_with_their_rank_and_change_no_state(name, bad):
    for count, world_size in [(100, 1), (700, 3)]:
        them, others = (cases.reducers(cases.ALL[name], count, world_size) for _ in range(2))
        first = cases.vectors(count + 1, world_size)
        cases.mean_of(them, first, 1), cases.mean_of(others, first, 1)
        culprit = world_size - 1
        for places in ([0], [3, 99], list(range(count))):
            given = cases.vectors(count + 1, world_size, 1)
            given[culprit][places] = bad
            outcome, _ = cases.attempt(them, given, 1)
            reason = f"{BAD} rank {culprit} has {len(places)}"
            assert outcome.results == [reason] * world_size
            assert cases.are_same(cases.errors_of(them), cases.errors_of(others))
        last = cases.vectors(count + 1, world_size, 2)
        assert torch.equal(cases.mean_of(them, last, 1)[0], cases.mean_of(others, last, 1)[0])
        assert cases.are_same(cases.errors_of(them), cases.errors_of(others))


@pytest.mark.parametrize("name", cases.ALL)
def test_all_ranks_with_non_finite_elements_or_extras_are_reported(name):
    them = cases.reducers(cases.ALL[name], 50, 3)
    for places, ranks in (
        ([(0, 5), (2, 0), (2, 1)], "rank 0 has 1, rank 2 has 2"),
        ([(1, 51)], "rank 1 has 1"),
    ):
        given = cases.vectors(52, 3)
        for rank, place in places:
            given[rank][place] = torch.nan if rank < 2 else torch.inf
        assert cases.attempt(them, given, 2)[0].results == [f"{BAD} {ranks}"] * 3
    cases.mean_of(them, cases.vectors(52, 3), 2)


@pytest.mark.parametrize("name", ["dense", "rounded float32", "int8", "int4, then bfloat16"])
def test_a_sum_that_overflows_is_reported_and_changes_no_state(name):
    them, others = (cases.reducers(cases.ALL[name], 200, 3) for _ in range(2))
    first = cases.vectors(200, 3)
    cases.mean_of(them, first), cases.mean_of(others, first)
    outcome, _ = cases.attempt(them, [torch.full((200,), 2e38)] * 3)
    assert outcome.results == ["the mean overflows"] * 3
    assert cases.are_same(cases.errors_of(them), cases.errors_of(others))
    assert torch.equal(cases.mean_of(them, first)[0], cases.mean_of(others, first)[0])


@pytest.mark.parametrize("name", [*cases.FEEDBACK, *cases.SPARSE_FEEDBACK])
def test_an_element_that_overflows_with_its_error_is_reported_with_its_rank(name):
    them = cases.reducers(cases.ALL[name], 64, 2)
    them[1].worker_error.fill_(3e38)
    before = cases.errors_of(them)
    outcome, _ = cases.attempt(them, [torch.full((64,), 1.0), torch.full((64,), 3e38)])
    (skip_reason,) = set(outcome.results)
    assert skip_reason.startswith(f"{BAD} rank 1 has")
    assert cases.are_same(cases.errors_of(them), before)


@pytest.mark.parametrize("name", [*cases.CODES, *cases.SPARSE])
def test_means_resume_bit_for_bit_from_a_checkpoint(name):
    count, world_size = 400, 3
    them, fresh = (cases.reducers(cases.ALL[name], count, world_size) for _ in range(2))
    for step in range(3):
        cases.mean_of(them, cases.vectors(count, world_size, step))
    file = io.BytesIO()
    torch.save([each.errors() for each in them], file)
    file.seek(0)
    resumed = cases.reducers(cases.ALL[name], count, world_size)
    for each, errors in zip(resumed, torch.load(file, weights_only=True), strict=True):
        each.load_errors(errors)
    given = cases.vectors(count, world_size, 3)
    found = cases.mean_of(resumed, given)[0]
    assert torch.equal(found, cases.mean_of(them, given)[0])
    assert cases.are_same(cases.errors_of(resumed), cases.errors_of(them))
    # the state changes the result, except of top-k without errors
    has_state = name in cases.FEEDBACK or name in cases.SPARSE or "random" in name
    has_state &= name != "topk without errors"
    assert torch.equal(found, cases.mean_of(fresh, given)[0]) == (not has_state)


@pytest.mark.parametrize("name", ["sign of 32", "int4 at random", "int4 at random without errors"])
def test_another_number_of_ranks_resumes_with_all_errors(name):
    count, sum_of_means, sum_of_vectors = 333, 0, 0
    them = cases.reducers(cases.ALL[name], count, 3)
    for number, world_size in enumerate((3, 2, 1, 5)):
        if number:
            empty = {name: {} for name in ("shared", "local", "shards", "resize")}
            states = [
                {"rank": rank, "world_size": len(them), "errors": {"momentum": each.errors()}}
                | empty
                for rank, each in enumerate(them)
            ]
            if world_size == 1 and name in cases.FEEDBACK:
                # what one worker's own vector cannot bring
                sum_of_vectors = sum_of_vectors - cases.pending(them)
            them = cases.reducers(cases.ALL[name], count, world_size)
            for rank, each in enumerate(them):
                each.load_errors(resize_state(states, rank, world_size)["errors"]["momentum"])
        for step in range(2):
            given = cases.vectors(count, world_size, step)
            sum_of_means = sum_of_means + cases.mean_of(them, given)[0].double()
            sum_of_vectors = sum_of_vectors + exact_mean(given, count)
    if name in cases.FEEDBACK:
        assert (sum_of_means + cases.pending(them) - sum_of_vectors).abs().max() <= 1e-4
    if "random" in name:
        # none with one worker alone
        assert [each.means for each in them] == [6] * 5


def test_errors_of_another_vector_are_refused():
    sign, plain = cases.COMPRESSIONS["sign"], cases.COMPRESSIONS["int8 without errors"]
    kept = cases.reducers(sign, 100, 2)[-1].errors()
    for name, count, world_size in [(sign, 101, 2), (sign, 100, 3), (plain, 100, 2)]:
        with pytest.raises(ValueError, match=r"(?s)errors of shapes .*hint: .*resize_state"):
            cases.reducers(name, count, world_size)[-1].load_errors(kept)
    # of somebody who left nothing out
    reducer = cases.reducers(sign, 100, 2)[0]
    reducer.worker_error.fill_(1)
    reducer.load_errors({})
    assert not reducer.worker_error.any()


def test_processes_compute_the_same_means_as_lockstep(tmp_path):
    # torch's own collectives send the longer rows
    kinds = [*cases.FEW, "rounded", "randomk different", "block"]
    lengths = {333: kinds, 300_000: ["sign", "int8", "int4, then bfloat16"]}
    outcome = lockstep([cases.steps_of(rank, 2, lengths) for rank in range(2)])
    for (found, sent), expected, ledger in zip(
        results(2, tmp_path, cases.as_worker, lengths),
        outcome.results,
        outcome.ledgers,
        strict=True,
    ):
        assert len(found) == len(expected) == 2 * (len(kinds) + 3)
        assert all(map(torch.equal, found, expected))
        assert sent == pytest.approx(ledger.bytes_sent, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.FEW)
def test_means_on_a_gpu_equal_those_on_the_cpu(name, device):
    count, world_size = 5000, 3
    here = cases.reducers(cases.ALL[name], count, world_size)
    there = cases.reducers(cases.ALL[name], count, world_size, device=device)
    for step in range(3):
        given = cases.vectors(count + 2, world_size, step)
        expected = cases.mean_of(here, given, 2)
        found = cases.mean_of(there, [vector.to(device) for vector in given], 2)
        # scales of signs are sums, whose order depends on the device
        room = 1e-5 if name.startswith("sign") else 1e-6
        torch.testing.assert_close(found[0].cpu(), expected[0], rtol=room, atol=1e-6)
        assert all(torch.equal(each, found[0]) for each in found)
