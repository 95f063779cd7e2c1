"""One table of strategies, and one test of each promise that all of them make."""

import copy

import pytest
import torch
from optim.kinds import CASES, KINDS, LOCAL, LOCAL_CASES, LOCAL_VARIANTS, WITH_CLOSURE
from optim.local import all_equal, gradients_of, mean_of, saved, vector_of
from optim.models import Everything, batches, loss_of
from processes import results

from gcnzc.exchange import Group, init_group, lockstep
from gcnzc.optim import resize_state

END = 12


def without_closure(names):
    return [name for name in names if name not in WITH_CLOSURE]


def team(name, world_size, dtype=torch.float32, **options):
    """Models that differ until the first step, and their optimizers."""
    models = [Everything().to(dtype) for _ in range(world_size)]
    with torch.no_grad():
        for rank, model in enumerate(models):
            for parameter in model.parameters():
                # a frozen parameter is not synchronized by all
                parameter.add_(rank * parameter.requires_grad)
    return models, [
        CASES[name](model, Group(rank, world_size), **options) for rank, model in enumerate(models)
    ]


def steps_of(model, optimizer, begin, end, spoilt=None):
    """Steps of a rank; if it is rank 1, the gradient of step `spoilt` is not finite."""
    yield from optimizer.broadcast_model_algorithm()
    for number, rows in enumerate(batches(end)[begin:], begin):
        gradients_of(model, optimizer, rows)
        if number == spoilt and optimizer.group.rank == 1:
            model.first.bias.grad[0] = torch.nan
        yield from optimizer.algorithm()


def train(models, optimizers, begin, end, spoilt=None):
    pairs = zip(models, optimizers, strict=True)
    return lockstep([steps_of(*pair, begin, end, spoilt) for pair in pairs])


def finalize(optimizers):
    lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])


def states_of(optimizers):
    """Their states after pending exchanges, as a checkpoint gives them back."""
    # strategies that exchange in every step have none
    delayed = [each for each in optimizers if hasattr(each, "finish_pending_algorithm")]
    lockstep([each.finish_pending_algorithm() for each in delayed])
    return [saved(optimizer.state_dict()) for optimizer in optimizers]


def resumed(name, models, optimizers, world_size):
    """Optimizers of so many ranks that resume from rank 0's model and the states of all."""
    states, weights = states_of(optimizers), models[0].state_dict()
    others, loaded = team(name, world_size)
    for rank, (model, optimizer) in enumerate(zip(others, loaded, strict=True)):
        model.load_state_dict(weights)
        if name == "averaged":
            # the state of its inner optimizer, which is that of any rank
            optimizer.load_state_dict(copy.deepcopy(states[0]))
        else:
            optimizer.load_state_dict(resize_state(states, rank, world_size))
    return others, loaded


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_resumes_after_every_step_is_the_same_bit_for_bit(name):
    models, optimizers = team(name, 2)
    train(models, optimizers, 0, END, spoilt=3)
    others, loaded = team(name, 2)
    for step in range(END):
        train(others, loaded, step, step + 1, spoilt=3)
        others, loaded = resumed(name, others, loaded, 2)
    assert all(map(torch.equal, map(vector_of, models), map(vector_of, others)))
    for one, other in zip(optimizers, loaded, strict=True):
        assert (one.steps, one.skipped) == (other.steps, other.skipped)
    assert optimizers[1].skipped == 1
    finalize(optimizers)
    finalize(loaded)
    assert torch.equal(vector_of(models[0]), vector_of(others[0]))


def pending_errors(optimizers):
    """What compression has left out so far, of the mean over the ranks."""
    states = [optimizer.snapshot().get("errors", {}) for optimizer in optimizers]
    found = {}
    for name in states[0]:
        errors = [state[name] for state in states]
        if "worker" in errors[0]:
            found[name] = sum(each["worker"].double() for each in errors) / len(errors)
        if "server" in errors[0]:
            found[name] = found[name] + torch.cat([each["server"].double() for each in errors])
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_with_other_numbers_of_ranks(name):
    models, optimizers = team(name, 3)
    step = 0
    for world_size in (2, 4, 1, 2):
        train(models, optimizers, step, step + 6)
        step += 6
        others, loaded = resumed(name, models, optimizers, world_size)
        if not (name.startswith("co2") and world_size == 1):
            # with a delay, the only rank applies what is pending at once
            torch.testing.assert_close(mean_of(others), mean_of(models))
        if min(world_size, len(models)) > 1:
            before, after = pending_errors(optimizers), pending_errors(loaded)
            assert before.keys() == after.keys()
            for key, value in before.items():
                torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-6)
        models, optimizers = others, loaded
        assert {optimizer.steps for optimizer in optimizers} == {step}
    train(models, optimizers, step, step + 8)
    finalize(optimizers)
    assert all_equal(models)
    assert vector_of(models[0]).isfinite().all()
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]


@pytest.mark.parametrize("name", [each for each in KINDS if each != "averaged"])
def test_a_state_of_another_rank_is_rejected(name):
    models, optimizers = team(name, 2)
    train(models, optimizers, 0, 2)
    with pytest.raises(ValueError, match=r"(?s)rank 1 of 2 cannot .* rank 0 of 2.*\n\nhint: "):
        optimizers[0].load_state_dict(states_of(optimizers)[1])


def train_as_worker():
    """The parameters of a rank after some steps, of their mean between, and at the end."""
    found = {}
    with init_group(timeout_s=60) as group:
        for name, make in CASES.items():
            model = Everything().float()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(group.rank * parameter.requires_grad)
            optimizer = make(model, group)
            seen = []
            for step, rows in enumerate(batches(7)):
                gradients_of(model, optimizer, rows)
                optimizer.step()
                if step == 4:
                    state = saved(optimizer.state_dict())
                    own = optimizer.average_parameters()
                    seen.append(vector_of(model))
                    optimizer.restore_parameters(own)
                    optimizer.load_state_dict(state)
            seen.append(vector_of(model))
            optimizer.finalize()
            found[name] = [*seen, vector_of(model)]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results(2, tmp_path_factory.mktemp("ranks"), train_as_worker)


@pytest.mark.parametrize("name", CASES)
def test_processes_compute_what_lockstep_computes(ranks, name):
    models, optimizers = team(name, 2)
    train(models, optimizers, 0, 5)
    lockstep([optimizer.average_parameters_algorithm() for optimizer in optimizers])
    expected = [[vector_of(model)] for model in models]
    models, optimizers = team(name, 2)
    train(models, optimizers, 0, 7)
    for seen, model in zip(expected, models, strict=True):
        seen.append(vector_of(model))
    finalize(optimizers)
    for found, seen, model in zip(ranks, expected, models, strict=True):
        assert all(map(torch.equal, found[name], [*seen, vector_of(model)]))


@pytest.mark.parametrize("name", without_closure(LOCAL | LOCAL_VARIANTS))
def test_a_single_rank_takes_only_the_steps_of_the_inner_optimizer(name):
    (model,), (optimizer,) = team(name, 1)
    train([model], [optimizer], 0, END)
    expected = Everything().float()
    inner = CASES[name](expected, Group()).inner
    for rows in batches(END):
        inner.zero_grad()
        loss_of(expected, rows).backward()
        inner.step()
    assert torch.equal(vector_of(model), vector_of(expected))
    optimizer.finalize()
    assert torch.equal(vector_of(model), vector_of(expected))


@pytest.mark.parametrize("name", LOCAL_CASES)
def test_the_mean_of_the_parameters_is_set_for_an_evaluation_and_by_finalize(name):
    models, optimizers = team(name, 3)
    undisturbed, others = team(name, 3)
    train(models, optimizers, 0, 6)
    own, mean = [vector_of(model) for model in models], mean_of(models)
    kept = lockstep([optimizer.average_parameters_algorithm() for optimizer in optimizers]).results
    assert all_equal(models)
    torch.testing.assert_close(vector_of(models[0]), mean)
    for optimizer, each in zip(optimizers, kept, strict=True):
        optimizer.restore_parameters(each)
    assert all(map(torch.equal, own, map(vector_of, models)))
    train(models, optimizers, 6, END)
    train(undisturbed, others, 0, END)
    assert all(map(torch.equal, map(vector_of, undisturbed), map(vector_of, models)))
    for begin in (END, END + 3):
        train(models, optimizers, begin, begin + 3)
        mean = mean_of(models)
        finalize(optimizers)
        assert all_equal(models)
        after = vector_of(models[0])
        if not name.startswith(("co2", "streaming", "zero-one")):
            # a delayed mean that is pending is applied before, and 0/1 Adam compresses the last
            torch.testing.assert_close(after, mean)
        finalize(optimizers)
        assert torch.equal(vector_of(models[0]), after)


# the steps after which a signal that rank 2 gives from step 4 on is received, if not after each
RECEIVED = {
    "zero-one-adam local steps": (4, 5, 8, 9, 12),
    **dict.fromkeys(("local-sgd", "diloco", "diloco sharded", "fedglomo", "saps"), (4, 8, 12)),
    **dict.fromkeys(("co2", "co2 sharded"), (8, 12)),
    "streaming-diloco": (5, 7, 9, 11),
    **dict.fromkeys(("backup-workers", "diloco quorum"), (7, 9, 11)),
    "a2cid2": (4, 6, 8, 10, 12),
}


@pytest.mark.parametrize("name", KINDS)
def test_signals_of_one_rank_are_received_in_the_same_steps_on_all(name):
    models, optimizers = team(name, 3, signals=2)
    received = []
    for step in range(END):
        optimizers[2].signals = [False, step >= 3]
        train(models, optimizers, step, step + 1)
        flags = {tuple(optimizer.received_signals) for optimizer in optimizers}
        assert len(flags) == 1
        assert flags < {(False, False), (False, True)}
        if (False, True) in flags:
            received.append(step + 1)
    assert tuple(received) == RECEIVED.get(name, tuple(range(4, END + 1)))


@pytest.mark.parametrize("name", without_closure(LOCAL_CASES))
def test_parameters_of_half_precision_keep_their_dtype(name):
    models, optimizers = team(name, 2, torch.bfloat16)
    train(models, optimizers, 0, 5)
    finalize(optimizers)
    assert all_equal(models)
    assert {parameter.dtype for parameter in models[0].parameters()} == {torch.bfloat16}


# strategies that set the mean on all ranks after every fourth step, and at no other
IN_SYNC = (
    *("local-sgd", "local-sgd half", "diloco", "diloco sharded", "diloco sign", "diloco quorum"),
    *("co2 in sync", "co2 half", "co2 at once", "fedglomo"),
)


@pytest.mark.parametrize("name", IN_SYNC)
def test_ranks_are_in_sync_after_each_mean_and_at_no_other_step(name):
    models, optimizers = team(name, 3)
    for step in range(END):
        train(models, optimizers, step, step + 1)
        assert all_equal(models) == (step % 4 == 3)


@pytest.mark.parametrize("name", without_closure(KINDS))
def test_it_is_an_optimizer_of_torch(name):
    model = Everything().float()
    optimizer = CASES[name](model, Group())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rows = batches(1)[0]

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        return loss

    expected = float(loss_of(model, rows).detach())
    assert float(optimizer.step(closure).detach()) == pytest.approx(expected)
    scheduler.step()
    assert (
        optimizer.param_groups[0]["lr"]
        == getattr(optimizer, "inner", optimizer).param_groups[0]["lr"]
    )
    other = CASES[name](Everything().float(), Group())
    other.load_state_dict(saved(optimizer.state_dict()))
    group = other.param_groups[0]
    assert group["lr"] == group["initial_lr"] / 2
    optimizer.zero_grad()
    assert model.rare.grad is None
