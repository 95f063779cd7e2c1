"""What every method promises in training, each promise once for all methods of the table."""

import copy
import functools

import pytest
import torch
from optim import teams
from optim.methods import (
    AVERAGED,
    CASES,
    EVERY_STEP,
    FIXED_LAYOUT,
    LOCAL_CASES,
    LR,
    METHODS,
    WithGivenGradients,
)
from processes import results_once
from simulated_ranks import simulate
from slow_cases import mark_slow
from torch import nn

from gcnzc.exchange import Group, init_group, lockstep
from gcnzc.exchange.sync import synchronize_buffers
from gcnzc.optim import Averaged, DiLoCo, LocalSGD, OneBitAdam

END = 12


def without_closure(names):
    return [name for name in names if CASES[name].kind is not WithGivenGradients]


# --- limiting cases


def momentum_sgd(parameters):
    # linear in the gradients, so the mean of the ranks' steps is the step of the mean gradient
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)


def adam_of_replicated(parameters):
    return torch.optim.AdamW(parameters, lr=LR)


def fill_gradients(model):
    """Missing gradients count as zeros; a local optimizer would skip their parameters."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@functools.cache
def data_parallel(inner, clip_norm):
    """One rank that has all rows of every step."""
    model = teams.Everything()
    optimizer = inner(model.parameters())
    for rows in teams.batches(15):
        optimizer.zero_grad()
        teams.loss_of(model, rows).backward()
        fill_gradients(model)
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return teams.vector_of(model)


def limit_steps(model, optimizer):
    yield from optimizer.broadcast_model_algorithm()
    for rows in teams.batches(15):
        teams.set_gradients(model, optimizer, rows)
        fill_gradients(model)
        yield from optimizer.algorithm()
    yield from optimizer.finalize_algorithm()


def inners_of(name, method):
    if method.family == "replicated":
        return (adam_of_replicated,)
    if method.kind is WithGivenGradients:
        # has momentum of its own, and rejects others
        return (teams.sgd,)
    return (
        (teams.sgd, momentum_sgd, teams.adamw) if name == "averaged" else (teams.sgd, momentum_sgd)
    )


LIMITS = [
    (name, world_size, inner, None)
    for name, method in CASES.items()
    for world_size in (method.limit_ranks if method.limit is not None else ())
    for inner in inners_of(name, method)
]
CLIPPED = [
    (name, 3, inners_of(name, METHODS[name])[0], 0.5) for name in ("averaged", "onebit-adam")
]
CLIPPED.append(("zero-one-adam", 2, adam_of_replicated, 0.5))


def is_repeated(name, world_size, inner, clip_norm):
    """One number of ranks is enough for each inner optimizer."""
    return len(CASES[name].limit_ranks) > 1 and world_size != (2 if inner is momentum_sgd else 3)


# the limit needs an inner optimizer that is linear in the gradients, and Muon is not
@pytest.mark.filterwarnings("ignore:MuLoCo has SGD:UserWarning")
@pytest.mark.parametrize(
    ("name", "world_size", "inner", "clip_norm"), [*mark_slow(LIMITS, is_repeated), *CLIPPED]
)
def test_the_limiting_case_equals_data_parallel_training(name, world_size, inner, clip_norm):
    method, models = CASES[name], teams.diverse(world_size)
    options = method.limit | ({"clip_norm": clip_norm} if clip_norm else {})
    own = None if inner is adam_of_replicated else inner
    optimizers = method.optimizers(models, inner=own, **options)
    lockstep(teams.of_ranks(limit_steps, models, optimizers))
    expected = data_parallel(inner, clip_norm)
    for model in models:
        torch.testing.assert_close(teams.vector_of(model), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", without_closure(LOCAL_CASES))
def test_a_single_rank_takes_only_the_steps_of_the_inner_optimizer(name):
    (model,), (optimizer,) = CASES[name].team(1)
    teams.train([model], [optimizer], END)
    other = teams.Everything().float()
    expected = teams.train_alone(other, CASES[name].inner(other.parameters()), END)
    assert torch.equal(teams.vector_of(model), expected)
    optimizer.finalize()
    assert torch.equal(teams.vector_of(model), expected)


# --- processes


def train_as_worker():
    """The parameters of a rank after some steps, of their mean between, and at the end."""
    found = {}
    with init_group(timeout_s=60) as group:
        for name, method in CASES.items():
            model = teams.diverse(2, torch.float32)[group.rank]
            optimizer = method.make(model, group)
            seen = []
            for step, rows in enumerate(teams.batches(7)):
                teams.set_gradients(model, optimizer, rows)
                optimizer.step()
                if step == 4:
                    state = teams.saved(optimizer.state_dict())
                    own = optimizer.average_parameters()
                    seen.append(teams.vector_of(model))
                    optimizer.restore_parameters(own)
                    optimizer.load_state_dict(state)
            seen.append(teams.vector_of(model))
            optimizer.finalize()
            found[name] = [*seen, teams.vector_of(model)]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_once(tmp_path_factory, 2, train_as_worker)


@pytest.mark.parametrize("name", CASES)
def test_processes_compute_what_lockstep_computes(ranks, name):
    models, optimizers = CASES[name].team(2)
    teams.train(models, optimizers, 5)
    kept = lockstep([optimizer.average_parameters_algorithm() for optimizer in optimizers]).results
    expected = [[teams.vector_of(model)] for model in models]
    for optimizer, own in zip(optimizers, kept, strict=True):
        optimizer.restore_parameters(own)
    teams.train(models, optimizers, 7, 5)
    for seen, model in zip(expected, models, strict=True):
        seen.append(teams.vector_of(model))
    teams.finalize(optimizers)
    for found, seen, model in zip(ranks, expected, models, strict=True):
        assert all(map(torch.equal, found[name], [*seen, teams.vector_of(model)]))


# --- replicas


class Model(nn.Module):
    """With BatchNorm, other buffers and a frozen layer; their values depend on the seed."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("places", torch.randperm(7))
        self.register_buffer("offset", torch.randn(()))

    def forward(self, rows):
        return self.last(torch.tanh(self.norm(self.first(self.frozen(rows) + self.offset))))


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def are_equal(one, other, names=None):
    return all(torch.equal(one[name], other[name]) for name in names or one)


def train_with_module(group, name, has_module):
    """The state of the model before and after the optimizer is made, and at the end."""
    model = Model(group.rank)
    before = copied(model)
    optimizer = METHODS[name].make(model, group, **({"module": model} if has_module else {}))
    start = copied(model)
    teams.take_steps(model, optimizer, 9)
    optimizer.finalize()
    return before, start, copied(model)


@pytest.mark.parametrize("has_module", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_ranks_begin_with_the_model_of_rank_0_and_end_with_equal_ones(name, has_module):
    """Without the module, only the parameters are known, frozen ones included."""
    (before, start, end), (other, second, last) = simulate(2, train_with_module, name, has_module)
    compared = None if has_module else [each for each, _ in Model(0).named_parameters()]
    assert not torch.equal(before["frozen.weight"], other["frozen.weight"])
    assert are_equal(start, before)
    assert are_equal(second, before, compared)
    assert are_equal(end, last, compared)
    assert not torch.equal(end["first.weight"], start["first.weight"])
    if has_module:
        assert not torch.equal(end["norm.running_mean"], start["norm.running_mean"])
        assert end["norm.num_batches_tracked"] == 9


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_in_sync_after_exchanges_and_have_one_shared_state(name):
    method = CASES[name]
    models, optimizers = method.team(3)
    for step in range(END):
        teams.train(models, optimizers, step + 1, step)
        if method.every_step or method.is_in_sync:
            assert teams.all_equal(models) == (method.every_step or step % 4 == 3)
        first, *others = (teams.plain(each.snapshot().get("shared")) for each in optimizers)
        assert all(other == first for other in others)


@pytest.mark.parametrize("name", [*LOCAL_CASES, "zero-one-adam local steps"])
def test_the_mean_of_the_parameters_is_set_for_an_evaluation_and_by_finalize(name):
    models, optimizers = CASES[name].team(3)
    undisturbed, others = CASES[name].team(3)
    teams.train(models, optimizers, 6)
    own, mean = teams.vectors_of(models), teams.mean_of(models)
    kept = lockstep([optimizer.average_parameters_algorithm() for optimizer in optimizers]).results
    assert teams.all_equal(models)
    torch.testing.assert_close(teams.vector_of(models[0]), mean)
    for optimizer, each in zip(optimizers, kept, strict=True):
        optimizer.restore_parameters(each)
    assert torch.equal(own, teams.vectors_of(models))
    teams.train(models, optimizers, 10, 6)
    teams.train(undisturbed, others, 10)
    assert torch.equal(teams.vectors_of(undisturbed), teams.vectors_of(models))
    mean = teams.mean_of(models)
    teams.finalize(optimizers)
    assert teams.all_equal(models)
    after = teams.vector_of(models[0])
    if not name.startswith(("co2", "streaming", "zero-one")):
        # a delayed mean that is pending is applied before, and 0/1 Adam compresses the last
        torch.testing.assert_close(after, mean)
    teams.finalize(optimizers)
    assert torch.equal(teams.vector_of(models[0]), after)


@pytest.mark.parametrize("name", METHODS)
def test_signals_of_one_rank_are_received_in_the_same_steps_on_all(name):
    models, optimizers = METHODS[name].team(3, signals=2)
    received = []
    for step in range(END):
        optimizers[2].signals = [False, step >= 3]
        teams.train(models, optimizers, step + 1, step)
        flags = {tuple(optimizer.received_signals) for optimizer in optimizers}
        assert len(flags) == 1
        assert flags < {(False, False), (False, True)}
        if (False, True) in flags:
            received.append(step + 1)
    assert tuple(received) == METHODS[name].signals


# --- parameters and gradients of all kinds


def is_compressed(name):
    """Whether gradients are compressed: `Averaged` exchanges sparse ones as they are."""
    return name in AVERAGED and "compress" in METHODS[name].options


@pytest.mark.parametrize("name", [n for n in without_closure(METHODS) if not is_compressed(n)])
def test_sparse_gradients_are_as_dense_ones(name):
    found = []
    for sparse in (True, False):
        models = teams.diverse(3, sparse=sparse)
        optimizers = METHODS[name].optimizers(models, inner=teams.sgd)
        teams.train(models, optimizers, 8)
        teams.finalize(optimizers)
        assert models[0].table.weight.grad.is_sparse == sparse
        assert teams.all_equal(models)
        found.append(teams.vector_of(models[0]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def mixed(seed):
    """Parameters of several dtypes, one that is not contiguous and one without elements."""
    torch.manual_seed(seed)
    model = nn.ParameterList([torch.randn(4, 3), torch.randn(5).bfloat16(), torch.zeros(0)])
    model.append(nn.Parameter(torch.randn(3, 4).t()))
    return model


@pytest.mark.parametrize("name", METHODS)
def test_parameters_keep_their_dtypes_and_their_memory(name):
    models = [mixed(rank) for rank in range(2)]
    optimizers = METHODS[name].optimizers(models)
    before = [(each.dtype, each.stride(), each.data_ptr()) for each in models[0]]
    for step in range(9):
        for rank, model in enumerate(models):
            teams.set_noise(model, 10 * step + rank)
        teams.step_all(optimizers)
    teams.finalize(optimizers)
    assert teams.all_equal(models)
    assert [(each.dtype, each.stride(), each.data_ptr()) for each in models[0]] == before
    assert all(each.isfinite().all() for each in models[0])
    trained = zip(models[0], mixed(0), strict=True)
    assert all((each != start).any() for each, start in trained if each.numel())


@pytest.mark.parametrize("name", EVERY_STEP)
def test_a_gradient_that_is_missing_on_one_rank_counts_as_zeros(name):
    found = []
    for is_missing in (True, False):
        models = [Model(0) for _ in range(3)]
        optimizers = METHODS[name].optimizers(models)
        for step in range(8):
            for rank, model in enumerate(models):
                teams.set_noise(model, 10 * step + rank)
            bias = models[1].last.bias
            bias.grad = None if is_missing else torch.zeros_like(bias)
            teams.step_all(optimizers)
        assert teams.all_equal(models)
        found.append(teams.vector_of(models[0]))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", without_closure(METHODS))
def test_a_parameter_without_a_gradient_on_any_rank_is_not_updated(name):
    models, optimizers = METHODS[name].team(2)
    before = models[0].unused.detach().clone()
    teams.train(models, optimizers, 8)
    assert torch.equal(models[0].unused, before)
    assert name != "averaged" or models[0].unused.grad is None


def test_signals_and_options_are_exchanged_if_all_gradients_are_sparse():
    tables = [nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    optimizers = METHODS["averaged"].optimizers(tables, inner=teams.sgd, signals=2)
    optimizers[1].signals = [False, True]

    def take(steps):
        for _ in range(steps):
            for rank, table in enumerate(tables):
                table(torch.tensor([rank])).sum().backward()
            teams.step_all(optimizers)

    take(1)
    assert [optimizer.received_signals for optimizer in optimizers] == [[False, True]] * 2
    optimizers[1].param_groups[0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"lr of parameter group 0 differs between ranks"):
        take(20)


# --- as an optimizer of torch


@pytest.mark.parametrize("name", without_closure(METHODS))
def test_it_is_an_optimizer_of_torch(name):
    model = teams.Everything().float()
    optimizer = METHODS[name].make(model, Group())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rows = teams.batches(1)[0]

    def closure():
        optimizer.zero_grad()
        loss = teams.loss_of(model, rows)
        loss.backward()
        return loss

    expected = float(teams.loss_of(model, rows).detach())
    assert float(optimizer.step(closure).detach()) == pytest.approx(expected)
    scheduler.step()
    inner = getattr(optimizer, "inner", optimizer)
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"]
    other = METHODS[name].make(teams.Everything().float(), Group())
    other.load_state_dict(teams.saved(optimizer.state_dict()))
    group = other.param_groups[0]
    assert group["lr"] == group["initial_lr"] / 2
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    for _ in range(5):
        optimizer.step(closure)
        cycle.step()
    optimizer.zero_grad()
    assert model.rare.grad is None


# --- parameters that are frozen, unfrozen or added later


def unfreeze(group, name):
    """The error of a step after a layer is unfrozen, or that layer before and after training."""
    model = Model(group.rank)
    optimizer = METHODS[name].make(model, group)
    teams.take_steps(model, optimizer, 2)
    before = copied(model.frozen)
    model.frozen.requires_grad_(True)
    try:
        # to the end of an exchange, which with a delay of 4 steps begins at 4
        teams.take_steps(model, optimizer, 8, 2)
    except ValueError as error:
        return str(error), ""
    optimizer.finalize()
    return before, copied(model.frozen)


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_that_is_unfrozen_trains_in_sync_or_is_an_error_on_all_ranks(name):
    (before, after), (other, last) = simulate(2, unfreeze, name)
    if name in AVERAGED:
        assert not torch.equal(after["weight"], before["weight"])
        assert are_equal(after, last)
        return
    assert before == other
    expected = "group 0, parameter 0: requires_grad=True now, but requires_grad=False when "
    assert before.startswith(expected)


def add_group(group, name):
    """The parameters of a group that is added, before and after steps."""
    model = Model(group.rank)
    optimizer = METHODS[name].make(model, group)
    teams.take_steps(model, optimizer, 2)
    late = nn.Linear(1, 1)
    optimizer.add_param_group({"params": list(late.parameters())})
    before = copied(late)
    model.last = nn.Sequential(model.last, late)
    teams.take_steps(model, optimizer, 4, 2)
    return before, copied(late)


@pytest.mark.parametrize("name", METHODS)
def test_added_parameters_train_in_sync_or_are_an_error(name):
    if name in FIXED_LAYOUT:
        with pytest.raises(ValueError, match="does not support adding parameters\n\nhint: "):
            simulate(2, add_group, name)
        return
    (before, after), (other, second) = simulate(2, add_group, name)
    assert are_equal(before, other)
    assert are_equal(after, second)
    assert not torch.equal(after["weight"], before["weight"])


def test_freezing_later_or_adding_to_the_inner_optimizer_is_an_error():
    model = Model(0)
    for make in (OneBitAdam, lambda given: LocalSGD(torch.optim.SGD(given), local_steps=2)):
        optimizer = make(list(model.parameters()))
        model.last.bias.requires_grad_(False)
        with pytest.raises(ValueError, match=r"(?s)parameter 7: requires_grad=False now, .*hint: "):
            optimizer.step()
        model.last.bias.requires_grad_(True)
    inner = torch.optim.SGD(model.parameters())
    optimizer = DiLoCo(inner)
    inner.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match=r"group 1, parameter 0: .* but no such parameter when"):
        optimizer.step()


# --- buffers


def test_buffers_of_a_rank_that_overflowed_are_left_out_of_the_mean_and_constants_keep_their_bits():
    """A causal mask has infinities; the rounded mean of three equal numbers may be another one."""
    models = [nn.BatchNorm1d(2) for _ in range(3)]
    mask, scales = torch.full((4, 4), -torch.inf).triu(1), torch.rand(1000)
    for rank, model in enumerate(models):
        model.running_mean += 2.0 * rank
        model.register_buffer("mask", mask.clone())
        model.register_buffer("scales", scales.clone())
        model.register_buffer("adjacency", torch.eye(3).to_sparse())
    models[1].running_mean[0] = torch.nan
    models[1].running_var.fill_(torch.inf)
    lockstep([synchronize_buffers(model) for model in models])
    for model in models:
        torch.testing.assert_close(model.running_mean, torch.tensor([2.0, 2.0]))
        torch.testing.assert_close(model.running_var, torch.ones(2))
        assert torch.equal(model.mask, mask)
        assert torch.equal(model.scales, scales)
        assert torch.equal(model.adjacency.to_dense(), torch.eye(3))


def step_in_simulation(model, optimizer, begin, end):
    yield from optimizer.broadcast_model_algorithm()
    for step in range(begin, end):
        teams.backward(model, optimizer.group.rank, step)
        yield from optimizer.algorithm()
        yield from getattr(optimizer, "finish_pending_algorithm", lambda: ())()


@pytest.mark.parametrize("name", ["averaged", "averaged sign", "onebit-adam", "diloco"])
def test_buffers_of_a_run_that_is_resumed_stay_as_they_are(name):
    def made(first_seed):
        models = [Model(first_seed + rank) for rank in range(2)]
        make = lambda model, group: METHODS[name].make(model, group, module=model)  # noqa: E731
        return models, list(zip(models, teams.of_group(models, make), strict=True))

    models, pairs = made(0)
    lockstep([step_in_simulation(*pair, 0, 5) for pair in pairs])
    states = copy.deepcopy([(model.state_dict(), own.state_dict()) for model, own in pairs])
    others, loaded = made(2)
    for (model, optimizer), (weights, state) in zip(loaded, states, strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for each in (pairs, loaded):
        lockstep([step_in_simulation(*pair, 5, 8) for pair in each])
    assert not torch.equal(models[0].norm.running_mean, models[1].norm.running_mean)
    for model, right in zip(others, models, strict=True):
        assert are_equal(model.state_dict(), right.state_dict())


def test_ranks_whose_models_differ_are_an_error():
    def begin(models):
        make = lambda each, group: Averaged(teams.sgd(each.parameters()), group, module=each)  # noqa: E731
        teams.broadcast(teams.of_group(models, make))

    with pytest.raises(
        ValueError, match=r"named weight differs .*\(2, 2\) .* rank 0, \(3, 2\).* rank 2"
    ):
        begin([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)])
    with pytest.raises(ValueError, match=r"named bias differs .*: \(2,\).*, not set on rank 1"):
        begin([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for rank, model in enumerate(models):
        model.register_buffer("extra", torch.ones(1 + rank))
    with pytest.raises(ValueError, match=r"extra differs between ranks: \(1,\)"):
        begin(models)
