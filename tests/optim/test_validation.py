"""What optimizers refuse when they are constructed, and the options of torch's Adam."""

import math

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from gcnzc.exchange import Group
from gcnzc.optim import (
    CO2,
    Averaged,
    DiLoCo,
    LocalSGD,
    OneBitAdam,
    OneBitLamb,
    SelSync,
    StreamingDiLoCo,
    ZeroOneAdam,
)

ADAMS = [OneBitAdam, OneBitLamb, ZeroOneAdam]
WRAPPERS = [
    Averaged,
    lambda inner, group, **options: LocalSGD(inner, group, local_steps=2, **options),
    DiLoCo,
    lambda inner, group, **options: StreamingDiLoCo(inner, group, fragments=1, **options),
    CO2,
]
NAMES = ["Averaged", "LocalSGD", "DiLoCo", "StreamingDiLoCo", "CO2"]


def wrapping(make):
    return lambda parameters: make(torch.optim.SGD(parameters, lr=0.1), Group())


ALL = [*ADAMS, *map(wrapping, WRAPPERS)]
ALL_NAMES = [*(each.__name__ for each in ADAMS), *NAMES]


def parameter():
    return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("make", ALL, ids=ALL_NAMES)
def test_a_complex_parameter_is_rejected_by_name(make):
    values = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"parameter 1, of shape \(2,\), is torch.complex64.*\n"):
        make([parameter(), values])
    # one that is frozen is not trained
    values.requires_grad = False
    make([parameter(), values])


@pytest.mark.parametrize("make", [OneBitAdam, OneBitLamb])
@pytest.mark.parametrize(
    "options",
    [{"betas": 5}, {"warmup_range": (0,)}, {"total_steps": "a"}, {"total_steps": math.nan}],
)
def test_options_of_a_warm_up_that_mean_nothing_are_rejected(make, options):
    with pytest.raises((TypeError, ValueError)):
        make([parameter()], **options)


@pytest.mark.parametrize("make", WRAPPERS, ids=NAMES)
def test_a_module_that_is_another_model_is_rejected(make):
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="module is 5\n\nhint: "):
        make(inner, Group(), module=5)
    with pytest.raises(ValueError, match=r"module is a Linear without any of .*\n\nhint: "):
        make(inner, Group(), module=nn.Linear(2, 2))
    # a part of the parameters, of a larger model, and buffers only
    for module in (nn.Sequential(model, nn.Linear(2, 2)), nn.BatchNorm1d(2, affine=False)):
        make(inner, Group(), module=module)


def test_sharded_parameters_are_rejected_by_their_type():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh)
        for make in [*ADAMS, wrapping(Averaged), wrapping(SelSync)]:
            with pytest.raises(TypeError, match="parameter 0 is a DTensor"):
                make(model.parameters())
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("make", WRAPPERS, ids=NAMES)
def test_an_inner_optimizer_takes_one_step_for_one_gradient(make):
    with pytest.raises(TypeError, match="cannot wrap LBFGS, whose step calls a closure"):
        make(torch.optim.LBFGS([parameter()]), Group())
    with pytest.raises(TypeError, match="cannot wrap OneBitAdam, which communicates itself"):
        make(OneBitAdam([parameter()], group=Group()), Group())
    with pytest.raises(TypeError, match="wraps an optimizer of torch, not a list"):
        make([parameter()], Group())


@pytest.mark.parametrize("make", ADAMS)
def test_other_arguments_are_checked(make):
    for options, message in (
        ({"variance_floor": -1.0}, "variance_floor is -1.0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"signals": -1}, "signals is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            make([parameter()], group=Group(), **options)
    with pytest.raises(TypeError, match="amsgrat"):
        make([parameter()], group=Group(), amsgrat=True)
    # what torch's Adam has by default is no request
    make([parameter()], group=Group(), amsgrad=False, foreach=None, fused=None)


@pytest.mark.parametrize("make", WRAPPERS[2:], ids=NAMES[2:])
@pytest.mark.parametrize(
    "options", [{"outer_lr": -1.0}, {"outer_lr": math.nan}, {"outer_momentum": 1.0}]
)
def test_options_of_outer_optimizers_are_checked(make, options):
    (name, value), inner = *options.items(), torch.optim.SGD([parameter()], lr=0.1)
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        make(inner, Group(), **options)


def test_a_group_that_is_added_later_is_checked():
    optimizer = Averaged(torch.optim.AdamW([parameter()]), Group())
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.add_param_group({"params": [parameter()], "lr": -1})
    values = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex64"):
        optimizer.add_param_group({"params": [values]})
    assert len(optimizer.param_groups) == 1
