"""Options: which are refused, in constructors, states and steps, and their defaults."""

import copy
import inspect
import itertools
import math
import re
import warnings

import numpy as np
import pytest
import torch
from optim.methods import METHODS
from optim.teams import bits_of, step_all, step_on_numbers
from simulated_ranks import simulate
from slow_cases import mark_slow
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from gcnzc.compress import Dense, Sign, TopK
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import (
    CO2,
    SAPS,
    A2CiD2,
    Averaged,
    BackupWorkers,
    DecoupledDiLoCo,
    DiLoCo,
    DropCompute,
    FedGLOMO,
    LatePhaseWarning,
    LocalSGD,
    MuLoCo,
    Muon,
    OneBitAdam,
    OneBitLamb,
    SelSync,
    SparseLoCo,
    StreamingDiLoCo,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from gcnzc.train.build import build_optimizer
from gcnzc.train.config import STRATEGIES, TrainConfig

ADAMS = (OneBitAdam, OneBitLamb, ZeroOneAdam)
WRAPPERS = (Averaged, LocalSGD, DiLoCo, StreamingDiLoCo, CO2)
HALF = Dense(torch.float16)


def build(kind, group=None, inner=torch.optim.SGD, parameters=None, **options):
    """An optimizer of a class, with its defaults."""
    group = group or Group()
    parameters = list(nn.Linear(2, 2).parameters()) if parameters is None else parameters
    if kind in ADAMS:
        return kind(parameters, group=group, **options)
    if kind is Muon:
        return Muon(parameters, **options)
    return kind(inner(parameters, lr=0.1), group, **options)


# --- constructors

# for each class and number of ranks, single options that are out of range
REFUSED = {
    (OneBitAdam, 1): {
        "reactivate": ["maybe"],
        "gradient_compression": [Sign()],
        "variance_floor": [-1.0],
        "clip_norm": [0.0],
        "signals": [-1],
        "betas": [5],
    },
    (OneBitLamb, 1): {"trust_range": [(2, 1)], "factor_range": [(0, 1)]},
    (Muon, 1): {
        "lr": [-1.0],
        "momentum": [1.0],
        "betas": [(0.9, 1.0)],
        "ns_steps": [100],
        "adjust_lr_fn": ["other"],
    },
    (Averaged, 2): {"momentum": ["heavy"]},
    (LocalSGD, 2): {"local_steps": [0, True], "target": [0.0, -1.0]},
    (DiLoCo, 2): {"outer_lr": [-1.0, math.nan], "outer_momentum": [1.0]},
    (StreamingDiLoCo, 1): {"mixing": [1.5], "fragments": [0, 7], "delay": [1.5]},
    (CO2, 2): {
        "delay": [2],
        "clip": [0.0],
        "gap": ["gap", math.inf],
        "eager": [1.0],
        "outer_lr": [-1.0],
    },
    (A2CiD2, 3): {
        "topology": ["star", [(0, 1)], [(0, 1), (1, 3)]],
        "gossip_rate": [0],
        "eta": [-1.0],
        "control_interval": [0],
    },
    (SAPS, 2): {
        "density": [0.0, "a"],
        "probe_interval": [0],
        "bandwidth": [
            *([[0, 1, 2]], [[0, -1], [1, 0]], [[5, 0], [1, 0]], [[1, 2], [3]]),
            np.ones((3, 3)),
        ],
    },
    (SelSync, 2): {"threshold": [-1.0], "window": [10**9]},
    (BackupWorkers, 3): {"topology": ["3-regular"], "grace": [-1.0], "wait_interval": [0]},
    (DecoupledDiLoCo, 4): {"quorum": [2, 5]},
    (DecoupledDiLoCo, 1): {"quorum": [2]},
    (FedGLOMO, 2): {
        "round_weight": [0],
        "local_momentum": [1.1],
        "participants": [0, 3],
        "seed": [-1],
    },
}
# options that are refused together, and words of the message
TOGETHER = [
    (DropCompute, {"micro_batches": 1}, "micro_batches is 1"),
    (DropCompute, {"micro_batches": 4, "threshold": 0.0}, "threshold is 0.0"),
    (DropCompute, {"micro_batches": 4, "threshold": "none"}, "threshold is 'none'"),
    (DropCompute, {"micro_batches": 4, "calibration": (6, 5)}, r"calibration\[1\] is 5"),
    (DropCompute, {"micro_batches": 4, "max_dropped": 1.0}, "max_dropped is 1.0"),
    (Averaged, {"compress": TopK(0.1), "momentum": "heavy"}, "momentum is 'heavy'"),
    (DiLoCo, {"sharded": True, "compress": HALF}, "sharded=True with compress=Dense"),
    (CO2, {"sharded": True, "compress": HALF}, "sharded=True with"),
    (CO2, {"eager": 0.5, "delay": 0}, "eager is 0.5, with a delay of 0"),
    (StreamingDiLoCo, {"local_steps": 3, "delay": 3}, "a delay of 3 steps"),
    (StreamingDiLoCo, {"local_steps": "auto", "delay": 999}, "a delay of 999 steps"),
    (StreamingDiLoCo, {"local_steps": 3, "delay": "auto"}, "delay='auto' with local_steps=3"),
    (SAPS, {"bandwidth": np.ones((2, 2)), "probe_interval": 5}, "both bandwidth and probe_inter"),
    (DecoupledDiLoCo, {"quorum": 2, "grace_s": -1}, "grace_s is -1"),
    (DecoupledDiLoCo, {"quorum": 2, "local_steps": "auto"}, "quorum with local_steps='auto'"),
]


@pytest.mark.parametrize(("kind", "num_ranks"), REFUSED)
def test_an_option_out_of_range_is_refused_by_name(kind, num_ranks):
    for name, values in REFUSED[kind, num_ranks].items():
        for value in values:
            with pytest.raises((ValueError, TypeError)) as error:
                build(kind, Group(0, num_ranks), **{name: value})
            words = {"topology": "graph|topology", "gradient_compression": "feedback"}.get(
                name, name
            )
            stem = words.rstrip("s").replace("bandwidth", "")
            assert re.search(stem, str(error.value)), (name, value, str(error.value))


@pytest.mark.parametrize(("kind", "options", "message"), TOGETHER)
def test_options_that_do_not_go_together_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=f"(?s)^{message}.*\n\nhint: "):
        build(kind, Group(0, 2), **options)


@pytest.mark.parametrize(
    "options",
    [
        *({"warmup": 0}, {"warmup": 1.5}, {"variance_doubling": 0}, {"local_doubling": 1.5}),
        *({"max_local_interval": 12}, {"updates_variance_after_warmup": "x"}),
    ],
    ids=str,
)
def test_an_invalid_schedule_of_0_1_adam_is_refused(options):
    ((name, value),) = options.items()
    with pytest.raises((ValueError, TypeError), match=f"^{name} is {value!r}"):
        ZeroOneSchedule(**options)


DIFFERENT = [
    (OneBitAdam, {"warmup": 5}, {"warmup": 6}),
    (OneBitAdam, {"clip_norm": 0.1}, {"clip_norm": 1.1}),
    (Averaged, {"clip_norm": None}, {"clip_norm": 0.1}),
    *((kind, {}, {"inner": torch.optim.Adam}) for kind in (Averaged, LocalSGD)),
    (OneBitLamb, {"trust_beta": 0.9}, {"trust_beta": 0.8}),
    (ZeroOneAdam, {"schedule": ZeroOneSchedule(8)}, {"schedule": ZeroOneSchedule(9)}),
    (DropCompute, {"threshold": 1.0, "micro_batches": 4}, {"threshold": 2.0, "micro_batches": 4}),
    (LocalSGD, {"local_steps": 2}, {"local_steps": 3}),
    (DiLoCo, {"target": 0.1}, {"target": 0.2}),
    *((CO2, {}, {name: value}) for name, value in (("gap", 2.5), ("clip", None), ("delay", 0))),
    (A2CiD2, {"gossip_rate": 1}, {"gossip_rate": 2}),
    (SAPS, {"seed": 0}, {"seed": 1}),
    (SAPS, {"bandwidth": np.ones((2, 2))}, {"bandwidth": np.full((2, 2), 2.0)}),
    (SelSync, {"threshold": 0.1}, {"threshold": 1.1}),
]


def differ(group, kind, *options):
    name = next(iter(options[1]))
    message = rf"^{name} of {kind.__name__} differs between ranks: .+ on rank 0, .+ on rank 1\n"
    with pytest.raises(ValueError, match=message):
        build(kind, group, **options[group.rank])


@pytest.mark.parametrize(("kind", "own", "other"), DIFFERENT)
def test_options_that_differ_between_ranks_are_an_error_on_all_at_construction(kind, own, other):
    simulate(2, differ, kind, own, other)


# --- parameters, modules and inner optimizers


@pytest.mark.parametrize("kind", [*ADAMS, *WRAPPERS])
def test_parameters_that_cannot_be_averaged_are_rejected_by_name(kind):
    own, values = nn.Parameter(torch.ones(9)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"parameter 1, of shape \(2,\), is torch.complex64.*\n"):
        build(kind, parameters=[own, values])
    # one that is frozen is not trained
    values.requires_grad = False
    build(kind, parameters=[own, values])
    if kind is not Averaged:
        own.requires_grad = False
        with pytest.raises(ValueError, match="no parameter of the optimizer has requires_grad"):
            build(kind, parameters=[own])
        elsewhere = nn.Parameter(torch.ones(2, device="meta"))
        with pytest.raises(ValueError, match="on several devices: cpu, meta"):
            build(kind, parameters=[nn.Parameter(torch.ones(9)), elsewhere])


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_module_that_is_another_model_is_rejected(kind):
    model = nn.Linear(2, 2)
    own = {"parameters": list(model.parameters())}
    with pytest.raises(ValueError, match=r"module is a Linear without any of .*\n\nhint: "):
        build(kind, module=nn.Linear(2, 2), **own)
    # a part of the parameters, of a larger model, and buffers only
    for module in (nn.Sequential(model, nn.Linear(2, 2)), nn.BatchNorm1d(2, affine=False)):
        build(kind, module=module, **own)


def test_sharded_parameters_are_rejected_by_their_type():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))
        for kind in [*ADAMS, Averaged, SelSync]:
            with pytest.raises(TypeError, match="parameter 0 is a shard"):
                build(kind, parameters=model.parameters())
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_inner_optimizer_takes_one_step_for_one_gradient(kind):
    parameters = [nn.Parameter(torch.ones(3))]
    with pytest.raises(TypeError, match="cannot wrap LBFGS, whose step calls a closure"):
        kind(torch.optim.LBFGS(parameters), Group())
    with pytest.raises(TypeError, match="cannot wrap OneBitAdam, which communicates itself"):
        kind(OneBitAdam(parameters, group=Group()), Group())
    with pytest.raises(TypeError, match="wraps an optimizer of torch, not a list"):
        kind(parameters, Group())


UNKNOWN = [
    (OneBitAdam, {"amsgrad": True}),
    (DecoupledDiLoCo, {"quorum": 2, "compress": HALF}),
    (SelSync, {"local_steps": 4}),
    (SelSync, {"target": 0.1}),
    (LocalSGD, {"sharded": True}),
    (LocalSGD, {"delay_steps": 2}),
    (CO2, {"delay_steps": 2}),
]


@pytest.mark.parametrize(("kind", "options"), UNKNOWN)
def test_the_error_of_an_unknown_option_names_all(kind, options):
    *_, name = options
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__} has no option {name}\n\nhint: .*module"
    ):
        build(kind, Group(0, 2), **options)


def test_a_find_due_that_is_no_generator_is_named():
    class Always(LocalSGD):
        def find_due(self, step):
            return self.fragments

    optimizer = build(Always, alone=True)
    with pytest.raises(TypeError, match=r"Always\.find_due needs a `yield`; it has returned"):
        optimizer.step()


def test_a_missing_option_is_named_and_signatures_have_all_options():
    with pytest.raises(TypeError, match=r"^DecoupledDiLoCo needs the option quorum"):
        build(DecoupledDiLoCo, Group(0, 2))
    parameters = inspect.signature(StreamingDiLoCo).parameters
    assert list(parameters)[:2] == ["inner", "group"]
    assert parameters["fragments"].default == 4
    assert parameters["local_steps"].default == 12
    assert "delay_steps" not in parameters


def test_a_group_that_is_added_later_is_checked():
    optimizer = build(Averaged)
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": -1})
    values = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex64"):
        optimizer.add_param_group({"params": [values]})
    assert len(optimizer.param_groups) == 1


# --- weight and signals of a rank


@pytest.mark.parametrize("name", METHODS)
def test_weight_and_signals_are_checked_when_they_are_set(name):
    optimizer = METHODS[name].make(nn.Linear(3, 2), Group(1, 3), signals=2)
    for wrong in ("x", None, math.nan, math.inf, -1.0, True):
        with pytest.raises(ValueError, match=f"^weight is {wrong!r}"):
            optimizer.weight = wrong
        assert optimizer.weight == 1.0
    for weight in (0, 2, 0.5, torch.tensor(1.5)):
        optimizer.weight = weight
        assert optimizer.weight == float(weight)
    for wrong in ([True], [], (True, False, True)):
        with pytest.raises(
            ValueError, match=rf"^signals is .* signals=2\n\nhint: .*={len(wrong)} "
        ):
            optimizer.signals = wrong
    for wrong in ("ab", [True, "x"], [0.5, False]):
        with pytest.raises(TypeError, match=r"^signals"):
            optimizer.signals = wrong
    assert optimizer.signals == [False, False]
    optimizer.signals = (1, False)
    assert optimizer.signals == [True, False]


@pytest.mark.parametrize(("change", "error"), [("yes", TypeError), (None, ValueError)])
def test_signals_that_were_set_in_place_are_checked_when_they_are_sent(change, error):
    model = nn.Linear(2, 2)
    optimizer = build(OneBitAdam, parameters=model.parameters(), signals=2)
    model(torch.ones(2)).sum().backward()
    if change:
        optimizer.signals[1] = change
    else:
        optimizer.signals.append(True)
    with pytest.raises(error, match=r"^signals"):
        optimizer.step()


# --- options of groups that are out of range, in a state or changed before a step

WRONG = [
    ("lr", math.nan, "lr{where} is nan"),
    ("lr", "fast", "lr{where} is 'fast'"),
    ("lr", [0.1, 0.2], r"lr{where} is \[0.1, 0.2\]"),
    ("lr", torch.tensor(-1.0), r"lr{where} is tensor\(-1.\)"),
    ("eps", -1e-8, "eps{where} is -1e-08"),
    ("weight_decay", math.nan, "weight_decay{where} is nan"),
    ("betas", (1.0, 0.9), r"betas\[0\]{where} is 1.0"),
    ("betas", (0.9, -0.1), r"betas\[1\]{where} is -0.1"),
    ("betas", 0.9, "betas{where} is 0.9"),
    ("maximize", "no", "maximize{where} is 'no'"),
]


def two_groups(name):
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    holder = nn.Module()
    holder.parameters = lambda: groups
    return model, METHODS[name].make(holder, Group())


def is_repeated(name, option, value, message):
    """All methods with the first wrong option, and one of each family with all of them."""
    return name not in ("averaged", "zero-one-adam", "diloco") and message != WRONG[0][2]


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    mark_slow(((name, *wrong) for name, wrong in itertools.product(METHODS, WRONG)), is_repeated),
)
def test_an_option_out_of_range_is_refused_by_the_next_step_and_in_a_state(
    name, option, value, message
):
    model, optimizer = two_groups(name)
    step_on_numbers(model, optimizer, 5)
    before = bits_of(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][1][option] = value
    in_state = message.format(where=" of parameter group 1 of the state")
    with pytest.raises(ValueError, match=f"^{in_state}\n\nhint: "):
        optimizer.load_state_dict(state)
    assert bits_of(model, optimizer) == before
    group = optimizer.param_groups[1]
    if option not in group:
        # a group of SGD has no options of Adam
        return
    was, group[option] = group[option], value
    with pytest.raises(ValueError, match=f"^{message.format(where=' of parameter group 1')}\n\nhi"):
        optimizer.step()
    # the optimizer remains usable
    group[option] = was
    assert bits_of(model, optimizer) == before
    step_on_numbers(model, optimizer, 1)
    assert optimizer.steps == 6


@pytest.mark.parametrize(
    ("option", "value"), [("momentum", math.nan), ("momentum", "0.9"), ("nesterov", "yes")]
)
def test_other_options_of_inner_optimizers_keep_their_types(option, value):
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    for optimizer in (Averaged(inner, Group()), LocalSGD(inner, Group())):
        step_on_numbers(model, optimizer, 2)
        was = optimizer.param_groups[0][option]
        optimizer.param_groups[0][option] = value
        with pytest.raises(ValueError, match=rf"^{option} of parameter group 0 is {value!r}\n\nhi"):
            optimizer.step()
        optimizer.param_groups[0][option] = was


def test_integers_of_more_than_64_bits_are_no_options():
    _, optimizer = two_groups("onebit-adam")
    state = optimizer.snapshot()
    state["param_groups"][0]["eps"] = 10**30
    with pytest.raises(ValueError, match=r"eps(.|\n)*\n\nhint: "):
        optimizer.load_state_dict(state)


def test_ranks_that_all_have_the_option_raise_without_communication():
    models = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = METHODS["zero-one-adam"].optimizers(models)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(3)).sum().backward()
        optimizer.param_groups[0]["lr"] = math.nan
        # a group that is not connected would raise another error
        with pytest.raises(ValueError, match=r"^lr of parameter group 0 is nan"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
    step_all(optimizers)
    assert torch.equal(models[0].weight, models[1].weight)


# --- defaults, of the classes as from the command line

COMPRESSED = {"onebit-adam": OneBitAdam, "onebit-lamb": OneBitLamb, "zero-one-adam": ZeroOneAdam}
BY_NAME = COMPRESSED | {
    "local-sgd": LocalSGD,
    "diloco": DiLoCo,
    "muloco": MuLoCo,
    "sparseloco": SparseLoCo,
    "streaming-diloco": StreamingDiLoCo,
    "co2": CO2,
}


def with_defaults(method, parameters, group, **options):
    if method in COMPRESSED:
        options["lr"] = 0.001
    inner = Muon if method == "muloco" else torch.optim.AdamW
    return build(BY_NAME.get(method, Averaged), group, inner, parameters, **options)


def default_team(method, num_elements=2000, world_size=2, **options):
    parameters = [nn.Parameter(torch.ones(num_elements)) for _ in range(world_size)]
    return parameters, [
        with_defaults(method, [parameter], Group(rank, world_size), **options)
        for rank, parameter in enumerate(parameters)
    ]


def train_noisily(parameters, optimizers, steps):
    """Steps with noisy gradients of a square; return the bytes that rank 0 sent."""

    def take(rank):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            noise = torch.randn(parameters[rank].shape, generator=generator)
            parameters[rank].grad = parameters[rank].detach() + noise
            yield from optimizers[rank].algorithm()

    return lockstep([take(rank) for rank in range(len(optimizers))]).ledgers[0].bytes_sent


@pytest.mark.parametrize("steps", [40, 7000])
@pytest.mark.parametrize("method", BY_NAME)
def test_class_and_command_line_have_the_same_defaults(method, steps):
    assert method in STRATEGIES.targets or method in COMPRESSED
    group, parameters = Group(0, 4), list(nn.Linear(30, 20).parameters())
    option = "optimizer" if method in COMPRESSED else "strategy"
    config = TrainConfig(lr=0.001, **{option: method})
    of_command_line = build_optimizer(config, nn.Linear(30, 20), group, steps)
    # only a share of the run depends on its length
    options = {"total_steps": steps, "weight_decay": 0.0} if method in COMPRESSED else {}
    of_class = with_defaults(method, parameters, group, **options)
    # the inner optimizer is the caller's
    first, second = ({**each.option_texts(), "inner": ""} for each in (of_class, of_command_line))
    assert first == second


@pytest.mark.parametrize("method", BY_NAME)
def test_with_defaults_the_last_of_300_steps_send_less_than_a_quarter(method):
    parameters, optimizers = default_team(method)
    train_noisily(parameters, optimizers, 250)
    sent = train_noisily(parameters, optimizers, 48)
    assert 0 < sent < train_noisily(*default_team("averaged"), 48) / 4


@pytest.mark.parametrize("options", [{}, {"total_steps": 300}], ids=["unknown", "given"])
def test_with_defaults_0_1_adam_takes_local_steps_in_a_run_of_300_steps(options):
    parameters, optimizers = default_team("zero-one-adam", 20, **options)
    apart = 0
    for _ in range(300):
        train_noisily(parameters, optimizers, 1)
        apart += not torch.equal(*parameters)
    assert apart >= 50


LATE = {
    "onebit-adam": ({"warmup": 80}, "OneBitAdam: no compression"),
    "onebit-lamb": ({"warmup": 80}, "OneBitLamb: no compression"),
    "zero-one-adam": ({"schedule": ZeroOneSchedule(20)}, "ZeroOneAdam: no local steps"),
    "diloco": ({"local_steps": 80}, "DiLoCo: no exchange"),
    "streaming-diloco": ({"local_steps": 80}, "StreamingDiLoCo: no exchange"),
    "co2": ({"local_steps": 80}, "CO2: no exchange"),
}


@pytest.mark.parametrize("method", LATE)
def test_rank_0_warns_once_of_a_phase_that_begins_late(method):
    options, message = LATE[method]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_noisily(*default_team(method, 20, total_steps=100, **options), 49)
        assert not caught
        train_noisily(*default_team(method, 20, total_steps=100, **options), 60)
    (warning,) = caught
    assert str(warning.message).startswith(f"{message} in the first 50 steps of 100\n")
    option = "local_steps" if "no exchange" in message else "warmup"
    assert re.search(rf"\n\nhint: .*{option}", str(warning.message))


def test_the_warning_comes_after_1000_steps_if_the_length_is_not_known_and_can_be_silenced():
    with pytest.warns(LatePhaseWarning, match="no exchange in the first 1000 steps\n"):
        train_noisily(*default_team("diloco", 2, local_steps=1500), 1001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatePhaseWarning)
        train_noisily(*default_team("diloco", 2, total_steps=20, local_steps=20), 20)
    # one rank alone has nothing to exchange, and no local steps are no late phase
    alone = default_team("diloco", 2, world_size=1, total_steps=20, local_steps=20)
    train_noisily(*alone, 20)
    never = {"schedule": ZeroOneSchedule(None)}
    train_noisily(*default_team("zero-one-adam", 2, total_steps=20, **never), 20)


def test_defaults_do_not_warn():
    for method in BY_NAME:
        for steps in (30, 60):
            train_noisily(*default_team(method, 20, total_steps=steps), steps)
