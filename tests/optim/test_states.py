"""What every method promises of its state: resuming, other numbers of ranks, damage, copies."""

import copy
import pickle
import re
from functools import partial
from itertools import pairwise

import pytest
import torch
from optim.methods import CASES, METHODS, VARIANTS
from optim.teams import (
    Everything,
    all_equal,
    batches,
    bits_of,
    finalize,
    finish_pending,
    mean_of,
    of_ranks,
    plain,
    saved,
    set_gradients,
    states_of,
    step_on_numbers,
    train,
    vector_of,
    vectors_of,
)
from processes import results
from quick_runs import made_once
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gcnzc import optim
from gcnzc.exchange import Compute, Group, init_group, lockstep

END = 12
# whose state is that of its inner optimizer, and the same on all ranks
SHARED = "averaged"
WITH_STATE = [name for name in METHODS if name != SHARED]

# --- resuming


def resumed(name, models, optimizers, world_size):
    """Optimizers of so many ranks that resume from rank 0's model and the states of all."""
    states, weights = states_of(optimizers), models[0].state_dict()
    others, loaded = CASES[name].team(world_size)
    for rank, (model, optimizer) in enumerate(zip(others, loaded, strict=True)):
        model.load_state_dict(weights)
        # that of `averaged` is equal on all ranks
        state = optim.resize_state(states, rank, world_size)
        optimizer.load_state_dict(copy.deepcopy(state) if name == SHARED else state)
    return others, loaded


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_resumes_is_the_same_bit_for_bit(name):
    """In all phases of windows of local steps, and before, in and after a skipped step."""
    models, optimizers = CASES[name].team(2)
    train(models, optimizers, END, bad=3)
    others, loaded = CASES[name].team(2)
    steps = [0, 2, 5, 7, END] if name in VARIANTS else [0, 1, 3, 4, 6, 7, 9, END]
    for begin, end in pairwise(steps):
        train(others, loaded, end, begin, bad=3)
        others, loaded = resumed(name, others, loaded, 2)
    assert torch.equal(vectors_of(models), vectors_of(others))
    for one, other in zip(optimizers, loaded, strict=True):
        assert (one.steps, one.skipped) == (other.steps, other.skipped)
    assert optimizers[1].skipped == 1
    finalize(optimizers)
    finalize(loaded)
    assert torch.equal(vector_of(models[0]), vector_of(others[0]))


@pytest.mark.parametrize("name", METHODS)
def test_a_running_optimizer_that_loads_a_state_goes_on_as_a_new_one(name):
    models, optimizers = METHODS[name].team(2)
    train(models, optimizers, 5)
    weights, states = copy.deepcopy([each.state_dict() for each in models]), states_of(optimizers)
    teams = (models, optimizers), METHODS[name].team(2)
    train(models, optimizers, 8, 5)
    for pair in teams:
        for model, optimizer, values, state in zip(*pair, weights, states, strict=True):
            model.load_state_dict(values)
            optimizer.load_state_dict(copy.deepcopy(state))
        train(*pair, 10, 5)
    assert torch.equal(*(vectors_of(each) for each, _ in teams))


@pytest.mark.parametrize("name", WITH_STATE)
def test_steps_after_a_load_do_not_change_what_was_loaded(name):
    models, optimizers = METHODS[name].team(2)
    train(models, optimizers, 5)
    finish_pending(optimizers)
    snapshots = copy.deepcopy([each.snapshot() for each in optimizers])
    before = plain(copy.deepcopy(snapshots))
    for optimizer, snapshot in zip(optimizers, snapshots, strict=True):
        optimizer.load_state_dict(snapshot)
    train(models, optimizers, 9, 5)
    assert plain(snapshots) == before


@pytest.mark.parametrize("kind", [optim.Averaged, optim.LocalSGD])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_state_that_is_loaded_into_the_inner_optimizer_is_the_wrappers(kind, is_copied):
    model = nn.Linear(3, 2)
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Group())
    step_on_numbers(model, optimizer, 2)
    if is_copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    optimizer.inner.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    # what a scheduler does
    optimizer.param_groups[0]["lr"] = 0.0
    before = vector_of(model)
    step_on_numbers(model, optimizer, 1)
    assert torch.equal(vector_of(model), before)
    state = optimizer.state[model.weight]
    assert state is optimizer.inner.state[model.weight]
    assert "momentum_buffer" in state


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
    models, optimizers = CASES[name].team(3)
    step = 0
    for world_size in (2, 4, 1, 2):
        train(models, optimizers, step + 6, step)
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
    train(models, optimizers, step + 6, step)
    finalize(optimizers)
    assert all_equal(models)
    assert vector_of(models[0]).isfinite().all()
    assert [optimizer.skipped for optimizer in optimizers] == [0, 0]


def test_states_that_do_not_belong_together_are_an_error():
    (models, optimizers), (later, others) = (METHODS["diloco"].team(3) for _ in range(2))
    train(models, optimizers, 4)
    train(later, others, 5)
    states, other = states_of(optimizers), states_of(others)
    same = copy.deepcopy(states)
    optim.resize_state(states, 1, 2)
    assert repr(states) == repr(same)
    for wrong in (states[:2], states[::-1]):
        with pytest.raises(ValueError, match="give the states of all ranks, in the order of ranks"):
            optim.resize_state(wrong, 0, 2)
    with pytest.raises(ValueError, match="states of different steps"):
        optim.resize_state([*states[:2], other[2]], 0, 2)


def test_inner_state_missing_on_one_rank_is_that_of_the_others():
    """AdamW has no state for a parameter before its first gradient."""
    parameters = [[nn.Parameter(torch.ones(1)) for _ in range(2)] for _ in range(2)]
    optimizers = [
        optim.DiLoCo(torch.optim.AdamW(own), Group(rank, 2), local_steps=9)
        for rank, own in enumerate(parameters)
    ]
    for rank, own in enumerate(parameters):
        own[0].grad = torch.tensor([1.0 + 2 * rank])
        own[1].grad = torch.tensor([5.0]) if rank else None
    lockstep([optimizer.algorithm() for optimizer in optimizers])
    found = optim.resize_state(states_of(optimizers), 0, 1)["local"]["inner"]["state"]
    assert found[0]["exp_avg"].tolist() == pytest.approx([0.2])
    assert found[1]["exp_avg"].tolist() == pytest.approx([0.5])


# --- states of others


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_state_of_another_rank_is_rejected(name):
    models, optimizers = METHODS[name].team(2)
    train(models, optimizers, 2)
    with pytest.raises(ValueError, match=r"(?s)rank 1 of 2 cannot .* rank 0 of 2.*\n\nhint: "):
        optimizers[0].load_state_dict(states_of(optimizers)[1])


@pytest.mark.parametrize(
    "name", ["diloco", "co2", "streaming-diloco", "onebit-adam", "diloco quorum"]
)
def test_states_of_two_runs_at_the_same_step_are_an_error(name):
    models, optimizers = METHODS[name].team(3)
    for seed in range(2):
        others, theirs = METHODS[name].team(3)
        with torch.no_grad():
            others[0].table.weight.add_(seed)
        train(others, theirs, 6)
        for rank, state in enumerate(states_of(theirs)):
            if (rank == 1) == seed:
                models[rank].load_state_dict(others[rank].state_dict())
                optimizers[rank].load_state_dict(state)
    with pytest.raises(ValueError, match=r"(?s)content of the loaded state .* on rank 1\n\nhint: "):
        train(models, optimizers, 20, 6)


@pytest.mark.parametrize("name", METHODS)
def test_state_dicts_have_the_layout_of_torchs(name):
    model = nn.Linear(3, 2)
    optimizer = METHODS[name].make(model, Group())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert [group["params"] for group in state["param_groups"]] == [[0, 1]]
    assert set(state["state"]) == {0, 1}
    again = copy.deepcopy(model)
    other = METHODS[name].make(again, Group())
    # a step size that is changed in the state is that of the optimizer
    state["param_groups"][0]["lr"] = optimizer.param_groups[0]["lr"] = 0.5
    other.load_state_dict(state)
    for each, its in ((model, optimizer), (again, other)):
        its.zero_grad()
        each(torch.ones(3)).sum().backward()
        its.step()
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize("make", [optim.OneBitAdam, optim.OneBitLamb, optim.ZeroOneAdam])
def test_the_state_of_another_optimizer_is_refused_by_name(make):
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    adamw = torch.optim.AdamW([parameter])
    adamw.step()
    optimizer = make([parameter], group=Group())
    with pytest.raises(
        ValueError, match=r"of torch, with exp_avg, exp_avg_sq, step, not the state"
    ):
        optimizer.load_state_dict(adamw.state_dict())
    other = next(each for each in (optim.OneBitAdam, optim.ZeroOneAdam) if each is not make)
    state = other([parameter], group=Group()).state_dict()
    with pytest.raises(ValueError, match=f"the state of {other.__name__}, not of {make.__name__}"):
        optimizer.load_state_dict(state)
    diloco = optim.DiLoCo(torch.optim.AdamW([parameter]), Group(), local_steps=3)
    assert "local_steps=3" in repr(diloco)
    with pytest.raises(ValueError, match="before wrapping it"):
        diloco.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError, match="the state of DiLoCo, not of LocalSGD"):
        optim.LocalSGD(torch.optim.AdamW([parameter]), Group()).load_state_dict(diloco.state_dict())
    with pytest.raises(ValueError, match="not of the inner optimizer"):
        optim.Averaged(torch.optim.AdamW([parameter]), Group()).load_state_dict(state)


INNER = [
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop, torch.optim.Adafactor),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    partial(torch.optim.Adam, amsgrad=True),
    partial(torch.optim.AdamW, lr=torch.tensor(0.1), capturable=False),
]


@pytest.mark.parametrize("inner", INNER)
def test_averaged_loads_the_states_of_torchs_optimizers_and_they_load_its_own(inner):
    model, optimizers = nn.Linear(3, 2), []
    for _ in range(2):
        optimizers.append(optim.Averaged(inner(model.parameters()), Group()))
        step_on_numbers(model, optimizers[-1], 1)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert repr(optimizers[1].state_dict()) == repr(optimizers[0].state_dict())
    step_on_numbers(model, optimizers[1], 1)
    plain = inner(model.parameters())
    plain.load_state_dict(optimizers[1].state_dict())
    # its counts stay those of this optimizer
    optimizers[1].load_state_dict(plain.state_dict())
    assert optimizers[1].steps == 2


# --- damage


def linear_team(name, steps):
    """The models and optimizers of two ranks, of which each has a shard."""
    torch.manual_seed(0)
    models = [nn.Linear(16, 8) for _ in range(2)]
    optimizers = CASES[name].optimizers(models)

    lockstep(of_ranks(linear_steps, models, optimizers, steps))
    return models, optimizers


def linear_steps(model, optimizer, steps):
    yield from optimizer.broadcast_model_algorithm()
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() + 1 if parameter.requires_grad else None
        yield from optimizer.algorithm()
        # the results of overlapped exchanges are in the states
        yield from getattr(optimizer, "finish_pending_algorithm", lambda: ())()


def changed(snapshot, section, key, value):
    """A snapshot with another value; without it if it is None."""
    own = {name: each for name, each in snapshot[section].items() if name != key}
    return snapshot | {section: own if value is None else own | {key: value}}


def incomplete(snapshot, optimizer):
    """Snapshots without a value, with a shorter vector, or with a value of another method."""
    fields = {field.key: field for field in optimizer.declared.fields}
    for section in ("shared", "local", "shards"):
        for key, value in snapshot[section].items():
            field = fields[key]
            if field.resize != "drop" and not getattr(field, "is_optional", False):
                yield changed(snapshot, section, key, None)
            is_vector = isinstance(value, torch.Tensor) and len(value)
            if is_vector:
                yield changed(snapshot, section, key, 0.5)
            if is_vector and field.size is not None:
                yield changed(snapshot, section, key, value[:-1])
    for name, errors in snapshot["errors"].items():
        for key, value in errors.items():
            if value.ndim and len(value):
                for wrong in (value[:-1], 0.5, torch.full(value.shape, torch.nan)):
                    yield changed(snapshot, "errors", name, errors | {key: wrong})
    yield changed(snapshot, "shared", "of another method", 1)


@pytest.mark.parametrize("name", [*WITH_STATE, "diloco sign"])
def test_an_incomplete_or_damaged_state_is_rejected_and_nothing_is_loaded(name):
    # 0/1 Adam is between two synchronizations after 6 steps
    _, optimizers = linear_team(name, 6)
    models, others = linear_team(name, 2)
    before, found = bits_of(models[1], others[1]), optimizers[1].snapshot()
    states = list(incomplete(found, optimizers[1]))
    assert len(states) > 3
    whole = copy.deepcopy(optimizers[1].state_dict())
    for key, value in whole["state"][0].items():
        for position in (0, len(value) // 2, len(value) - 1) if key != "step" else ():
            # a bit is flipped
            data = bytearray(value)
            data[position] ^= 16
            entry = whole["state"][0] | {key: bytes(data)}
            states.append(whole | {"state": whole["state"] | {0: entry}})
    for state in states:
        with pytest.raises(ValueError, match=r"(?s)\n\nhint: "):
            others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before
    others[1].load_state_dict(found)


@pytest.mark.parametrize("name", ["averaged", "onebit-adam", "diloco"])
def test_what_is_no_state_is_rejected_and_nothing_is_loaded(name):
    models, others = linear_team(name, 2)
    before = bits_of(models[1], others[1])
    whole = others[1].state_dict()
    (group,) = whole["param_groups"]
    states = [None, {}, {"state": whole["state"]}, whole | {"param_groups": [group, group]}]
    for state in states:
        with pytest.raises(ValueError, match=r"(?s)\n\nhint: "):
            others[1].load_state_dict(state)
    assert bits_of(models[1], others[1]) == before


@pytest.mark.parametrize("name", METHODS)
def test_a_state_of_a_parameter_of_another_shape_is_refused_and_changes_nothing(name):
    def trained(shape, steps):
        torch.manual_seed(1)
        holder = nn.ParameterList([torch.randn(shape)])
        optimizer = METHODS[name].make(holder, Group())
        for _ in range(steps):
            holder[0].grad = holder[0].detach().clone()
            optimizer.step()
        return holder, optimizer

    _, optimizer = trained((3, 4), 5)
    # as many elements, and fewer
    for shape in ((4, 3), (2, 3)):
        other, loaded = trained(shape, 2)
        before = bits_of(other, loaded)
        with pytest.raises(ValueError, match=r"the state has (?s:.*)\n\nhint: load it into"):
            loaded.load_state_dict(copy.deepcopy(optimizer.snapshot()))
        assert bits_of(other, loaded) == before


def test_a_state_of_other_frozen_parameters_is_refused_if_it_has_compression_errors():
    def trained(steps, is_frozen=False):
        models = [nn.Linear(8, 4) for _ in range(2)]
        for model in models:
            model.weight.requires_grad_(not is_frozen)
        optimizers = METHODS["averaged sign"].optimizers(models)
        lockstep(of_ranks(linear_steps, models, optimizers, steps))
        return models, optimizers

    _, optimizers = trained(3)
    states = states_of(optimizers)
    for steps in (0, 2):
        models, others = trained(steps, is_frozen=True)
        for model, other, state in zip(models, others, states, strict=True):
            message = r"parameter 0 \(4, 8\), but this optimizer has parameter 0 \(4, 8\), frozen"
            with pytest.raises(ValueError, match=rf"{message}(?s:.*)requires_grad"):
                other.load_state_dict(state)
            # frozen again after the state is loaded, it is as in a run that freezes it then
            model.weight.requires_grad_(True)
            other.load_state_dict(state)
            model.weight.requires_grad_(False)
        before = models[0].weight.clone()
        lockstep(of_ranks(linear_steps, models, others, 2))
        assert torch.equal(models[0].weight, before)
        assert all_equal(models)


@pytest.mark.parametrize(
    ("of", "to", "words"),
    [
        ("co2 eager", "co2 in sync", "has eager=True, but this optimizer has eager=False"),
        ("co2", "co2 sharded", "has sharded=False, but this optimizer has sharded=True"),
        ("diloco sharded", "diloco", "has sharded=True, but this optimizer has sharded=False"),
    ],
)
def test_a_state_saved_with_other_options_is_rejected(of, to, words):
    _, optimizers = linear_team(of, 4)
    models, others = linear_team(to, 1)
    before = bits_of(models[0], others[0])
    with pytest.raises(ValueError, match=rf"{words}(?s:.*)\n\nhint: "):
        others[0].load_state_dict(optimizers[0].snapshot())
    assert bits_of(models[0], others[0]) == before


# --- torch.distributed.checkpoint, copies and pickles, over processes

# in the middle of windows of local steps, and with exchanges that go on
SAVED = 6
# one of each kind of state
KINDS = (
    *("averaged", "averaged sign", "onebit-adam", "onebit-lamb", "zero-one-adam local steps"),
    *("drop-compute", "streaming-diloco", "co2 sharded", "a2cid2", "backup-workers", "fedglomo"),
)
COPIED = ("averaged sign", "onebit-adam", "zero-one-adam local steps", "streaming-diloco", "co2")
OVERLAPPED = ("streaming-diloco", "co2")
OPTIONS = (
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"flatten_optimizer_state_dict": True},
)


def trained_model():
    """Whose trained parameters all have gradients: torch saves no state of one without."""
    model = Everything().float()
    model.unused.requires_grad_(False)
    return model


def step_from(model, optimizer, begin, end):
    for rows in batches(end)[begin:]:
        set_gradients(model, optimizer, rows)
        optimizer.step()


def with_state(model, optimizer):
    own = get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": own}


def save_and_load(name, group, folder):
    """Whether this rank goes on bit for bit, and its errors at the checkpoint and after loading."""
    pairs, errors = [], []
    for _ in range(2):
        model = trained_model()
        pairs.append((model, METHODS[name].make(model, group)))
    (model, optimizer), (again, other) = pairs
    step_from(model, optimizer, 0, SAVED)
    torch.save(optimizer.state_dict(), folder / f"{name} of {group.rank}")
    checkpoint.save(with_state(model, optimizer), checkpoint_id=folder / name)
    errors.append(repr(optimizer.snapshot().get("errors")))
    template = with_state(again, other)
    checkpoint.load(template, checkpoint_id=folder / name)
    again.load_state_dict(template["model"])
    set_optimizer_state_dict(again, other, template["optimizer"])
    errors.append(repr(other.snapshot().get("errors")))
    for pair in pairs:
        step_from(*pair, SAVED, SAVED + 4)
        # the extras of exchanges that go on are not those of the run that was saved
        pair[1].finalize()
    return bits_of(*pairs[0]) == bits_of(*pairs[1]), *errors


def copy_and_pickle(name, group):
    """Whether a copy and an unpickled optimizer go on as the original does."""
    model = Everything().float()
    pair = model, METHODS[name].make(model, group)
    torch.optim.lr_scheduler.StepLR(pair[1], 100)
    step_from(*pair, 0, SAVED)
    pairs = [pair, copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))]
    for each in pairs:
        step_from(*each, SAVED, SAVED + 4)
    first, *others = (bits_of(*each) for each in pairs)
    pairs[2][1].group.close()
    return [first == other for other in others]


def roll_back(name, group):
    """Whether an optimizer that loads a state during an exchange repeats the steps since then."""
    model = Everything().float()
    optimizer = METHODS[name].make(model, group)
    compute = optimizer.compute

    def compute_late(*words):
        yield Compute(0.2)
        return (yield from compute(*words))

    optimizer.compute = compute_late
    step_from(model, optimizer, 0, SAVED)
    weights, state = copy.deepcopy(model.state_dict()), saved(optimizer.state_dict())
    found = []
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        step_from(model, optimizer, SAVED, SAVED + 4)
        found.append(vector_of(model))
    optimizer.finalize()
    return torch.equal(*found)


def outcome_of(call, **options):
    """The message of the error that a call raises, or "works"."""
    try:
        call(**options)
    except (ValueError, checkpoint.CheckpointException) as error:
        return str(error)
    return "works"


def try_options(name, group):
    """What the options of `get_optimizer_state_dict` lead to: an error's message, or "works"."""
    model = trained_model()
    optimizer = METHODS[name].make(model, group)
    step_from(model, optimizer, 0, 2)
    found = {}
    for options in OPTIONS:
        state = get_optimizer_state_dict(model, optimizer)
        calls = {
            "get": partial(get_optimizer_state_dict, model, optimizer),
            "set": partial(set_optimizer_state_dict, model, optimizer, state),
        }
        for what, call in calls.items():
            found[(*options, what)] = outcome_of(call, options=StateDictOptions(**options))
    return found


def save_all(folder):
    with init_group(timeout_s=60) as group:
        return (
            {name: save_and_load(name, group, folder) for name in KINDS},
            {name: copy_and_pickle(name, group) for name in COPIED},
            {name: try_options(name, group) for name in (SHARED, "onebit-adam", "diloco")},
            {name: roll_back(name, group) for name in OVERLAPPED},
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two workers have saved and returned, once for all test processes."""
    name = "optimizer checkpoints"
    return made_once(tmp_path_factory, name, lambda folder: results(2, folder, save_all, folder))


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", KINDS)
def test_each_rank_resumes_bit_for_bit_from_a_distributed_checkpoint(ranks, name):
    for found, *_ in ranks:
        is_same, before, after = found[name]
        assert is_same
        assert before == after
    if name in ("onebit-adam", "onebit-lamb", "averaged sign"):
        # what compression has left out is each rank's own
        assert ranks[0][0][name][1] != ranks[1][0][name][1]


@pytest.mark.parametrize("name", COPIED)
def test_copies_and_unpickled_optimizers_continue_like_the_original(ranks, name):
    assert [copies[name] for _, copies, *_ in ranks] == [[True, True]] * 2


@pytest.mark.parametrize("name", OVERLAPPED)
def test_a_state_that_is_loaded_during_an_exchange_replaces_its_result(ranks, name):
    assert [repeated[name] for *_, repeated in ranks] == [True, True]


def test_the_step_of_an_optimizer_unpickled_without_other_ranks_is_an_error():
    group = pickle.loads(pickle.dumps(Group(1, 2, "")))
    parameter = nn.Parameter(torch.ones(3))
    optimizer = pickle.loads(pickle.dumps(optim.OneBitAdam([parameter], group=group)))
    assert (optimizer.group.rank, optimizer.group.world_size) == (1, 2)
    with pytest.raises(RuntimeError, match="rank 1 of 2 is not connected"):
        optimizer.step()


def test_options_are_refused_by_name_unless_all_ranks_have_the_same_state(ranks):
    for _, _, outcomes, _ in ranks:
        for name, found in outcomes.items():
            for (option, *_, what), message in found.items():
                # torch ignores the option there
                is_ignored = what == "set" and option == "flatten_optimizer_state_dict"
                if name == SHARED or is_ignored:
                    assert message == "works"
                    continue
                assert message.startswith(f"{option}=True is not supported, because each rank has")
                assert re.search("\n\nhint: omit the option(.|\n)*resize_state", message)


def load_on_other_ranks(folder):
    """For each optimizer, the error of loading another number of ranks' states, or "works"."""
    found = {}
    with init_group(timeout_s=60) as group:
        for name in ("averaged", "onebit-adam"):
            model = trained_model()
            optimizer = METHODS[name].make(model, group)
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            load = partial(checkpoint.load, checkpoint_id=folder / name)
            found[name] = outcome_of(load, state_dict=state)
    return found


def test_states_of_another_number_of_ranks_are_refused_with_the_rank(folder, tmp_path):
    for rank, found in enumerate(results(3, tmp_path, load_on_other_ranks, folder)):
        assert found["averaged"] == "works"
        message = found["onebit-adam"]
        assert "Missing key in checkpoint state_dict" in message
        assert f".of rank {rank} of 3" in message


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_distributed_checkpoint_is_converted_for_another_number_of_ranks(
    folder, name, world_size, tmp_path
):
    dcp_to_torch_save(folder / name, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)["optimizer"]
    states = [torch.load(folder / f"{name} of {rank}", weights_only=True) for rank in range(2)]
    for rank in range(world_size):
        found = optim.resize_state([whole], rank, world_size)
        if name == SHARED:
            # torch has named the parameters
            assert set(found) == {"state", "param_groups"}
            continue
        expected = optim.resize_state(states, rank, world_size)
        # torch has named the parameters of groups
        sections = found.keys() - {"param_groups"}
        assert repr({each: found[each] for each in sorted(sections)}) == repr(
            {each: expected[each] for each in sorted(sections)}
        )
        model = trained_model()
        optimizer = METHODS[name].make(model, Group(rank, world_size))
        optimizer.load_state_dict(copy.deepcopy(found))
        assert optimizer.steps == SAVED
        if world_size == 1:
            step_from(model, optimizer, SAVED, SAVED + 1)
            assert optimizer.steps == SAVED + 1
