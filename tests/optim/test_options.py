"""Options of strategies: which are refused, and that all ranks have the same."""

import math

import numpy as np
import pytest
import torch
from torch import nn

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
    LocalSGD,
    Muon,
    OneBitAdam,
    OneBitLamb,
    SelSync,
    StreamingDiLoCo,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from gcnzc.optim.sync_interval import INITIAL_STEPS

ADAMS = (OneBitAdam, OneBitLamb, ZeroOneAdam)
HALF, SIGN = Dense(torch.float16), Sign()


def build(kind, group, **options):
    """An optimizer of a class."""
    parameters = nn.Linear(2, 2).parameters()
    if kind in ADAMS:
        return kind(parameters, group=group, **options)
    if kind is Muon:
        return Muon(parameters, **options)
    inner = torch.optim.SGD(parameters, lr=0.1)
    return kind(inner, group, **options)


def refused(kind, num_ranks, *cases):
    return [(kind, num_ranks, *case) for case in cases]


REFUSED = [
    *refused(
        OneBitAdam,
        1,
        ({"reactivate": "maybe"}, "reactivate is 'maybe'"),
        ({"gradient_compression": SIGN}, ".* uses error feedback"),
    ),
    *refused(
        OneBitLamb,
        1,
        ({"trust_range": (2, 1)}, r"trust_range is \(2, 1\)\n\nhint: give the smallest"),
        ({"factor_range": (0, 1)}, r"factor_range\[0\] is 0\n\nhint: give a finite number"),
    ),
    *refused(
        Muon,
        1,
        ({"lr": -1.0}, "lr is -1.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"ns_steps": 100}, "ns_steps is 100"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn is 'other'"),
    ),
    *refused(
        Averaged,
        2,
        ({"compress": TopK(0.1), "momentum": "heavy"}, "momentum='heavy'.*hint: .*everywhere, mas"),
        ({"momentum": "masked"}, "momentum='masked' without compression.*hint: "),
    ),
    *refused(
        DropCompute,
        1,
        ({"micro_batches": 1}, "micro_batches is 1"),
        ({"micro_batches": 4, "threshold": 0.0}, "threshold is 0.0"),
        ({"micro_batches": 4, "threshold": "none"}, "threshold is 'none'"),
        ({"micro_batches": 4, "calibration": (6, 5)}, r"calibration\[1\] is 5"),
        ({"micro_batches": 4, "calibration": 5}, "calibration is 5"),
        ({"micro_batches": 4, "max_dropped": 1.0}, "max_dropped is 1.0"),
    ),
    *refused(
        LocalSGD,
        2,
        ({"local_steps": 0}, "local_steps is 0"),
        ({"local_steps": True}, "local_steps is True\n\nhint: "),
    ),
    *refused(DiLoCo, 2, ({"sharded": True, "compress": HALF}, "sharded=True with compress=Dense")),
    *refused(
        StreamingDiLoCo,
        1,
        ({"local_steps": 3, "delay": 3}, "a delay of 3 steps.*from 0 to 2"),
        ({"local_steps": "auto", "delay": INITIAL_STEPS}, f".*from 0 to {INITIAL_STEPS - 1}"),
        ({"local_steps": 3, "delay": "auto"}, "delay='auto' with local_steps=3"),
        # the results of exchanges would never be due
        ({"local_steps": 4, "delay": 1.5}, "delay is 1.5"),
        ({"mixing": 1.5}, "mixing is 1.5"),
        ({"fragments": 0}, "0 fragments"),
    ),
    *refused(
        CO2,
        2,
        ({"sharded": True, "compress": HALF}, "sharded=True with"),
        ({"delay": 2}, "a delay of 2 rounds"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"gap": "gap"}, "gap is 'gap'"),
        ({"gap": math.inf}, "gap is inf\n\nhint: give 'gap_aware', 'none', a finite divisor"),
        ({"eager": 1.0}, "eager is 1.0"),
        ({"eager": 0.5, "delay": 0}, "eager is 0.5, with a delay of 0"),
    ),
    *refused(
        A2CiD2,
        3,
        ({"topology": "star"}, "topology is 'star'\n\nhint: use one of 'ring', 'exponential'"),
        ({"topology": [(0, 1)]}, "a graph that does not connect rank 0 and rank 2"),
        ({"topology": [(0, 1), (1, 3)]}, r"the edge \(1, 3\) in a graph of 3 ranks"),
        ({"topology": [(0, 1, 2)]}, r"the edge \(0, 1, 2\) of a graph"),
        ({"topology": 5}, "topology is 5\n\nhint: give the name of a graph, or pairs of ranks"),
        ({"gossip_rate": 0}, "gossip_rate is 0\n\nhint: give a number above 0, at most 1000"),
        ({"eta": -1.0, "asynchronous": True}, "eta is -1.0"),
        ({"control_interval": 0}, "control_interval is 0"),
    ),
    *refused(
        SAPS,
        2,
        ({"density": 0.0}, "density is 0.0"),
        ({"density": "a"}, "density is 'a'\n\nhint: give the fraction"),
        ({"probe_interval": 0}, "probe_interval is 0"),
        ({"bandwidth": [[0, 1, 2]]}, r".*shape \(1, 3\)"),
        ({"bandwidth": [[0, -1], [1, 0]]}, ".*a number that is negative, infinite or NaN"),
        ({"bandwidth": [[5, 0], [1, 0]]}, "bandwidth is 0 for every pair of ranks"),
        ({"bandwidth": [[1, 2], [3]]}, r"bandwidth is \[\[1, 2\], \[3\]\], not a matrix"),
        ({"bandwidth": np.ones((2, 2)), "probe_interval": 5}, "both bandwidth and probe_interval"),
        ({"bandwidth": np.ones((3, 3))}, "bandwidths of 3 ranks for 2 ranks"),
    ),
    *refused(
        SelSync,
        2,
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"window": 10**9}, "window is 1000000000\n\nhint: give a whole number from 1 to 10000"),
    ),
    *refused(
        BackupWorkers,
        3,
        ({"topology": "3-regular"}, "a graph of 3 ranks with 3 neighbors"),
        ({"grace": -1.0}, "grace"),
        ({"wait_interval": 0}, "wait_interval"),
    ),
    *refused(
        DecoupledDiLoCo,
        4,
        ({"quorum": 2}, "a quorum of 2 of 4 ranks\n\nhint: give 3 to 4"),
        ({"quorum": 5}, "a quorum of 5 of 4 ranks"),
        ({"quorum": 3, "grace_s": -1}, "grace_s is -1"),
        ({"quorum": 3, "compress": HALF}, "quorum with compress="),
        ({"quorum": 3, "local_steps": "auto"}, "quorum with local_steps='auto'"),
    ),
    *refused(
        DecoupledDiLoCo,
        1,
        ({"quorum": 2}, "a quorum of 2 of 1 ranks\n\nhint: give 1"),
    ),
    *refused(
        FedGLOMO,
        2,
        ({"round_weight": 0}, "round_weight is 0"),
        ({"local_momentum": 1.1}, "local_momentum is 1.1"),
        ({"participants": 0}, "participants is 0"),
        ({"participants": 3}, "3 participants of 2 ranks"),
        ({"seed": -1}, "seed is -1"),
    ),
]


@pytest.mark.parametrize(("kind", "num_ranks", "options", "message"), REFUSED)
def test_an_option_out_of_range_is_refused(kind, num_ranks, options, message):
    with pytest.raises(ValueError, match=f"(?s)^{message}") as error:
        build(kind, Group(0, num_ranks), **options)
    assert "\n\nhint: " in str(error.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"warmup": 0}, ValueError, "warmup is 0"),
        ({"warmup": 1.5}, ValueError, "warmup is 1.5"),
        ({"variance_doubling": 0}, ValueError, "variance_doubling is 0"),
        ({"local_doubling": 1.5}, ValueError, "local_doubling is 1.5"),
        ({"max_local_interval": 12}, ValueError, "max_local_interval is 12"),
        ({"step_size": 5}, TypeError, "step_size is 5, not a function"),
        ({"updates_variance_after_warmup": "x"}, TypeError, ".* is 'x', not True or False"),
    ],
)
def test_an_invalid_schedule_of_0_1_adam_is_refused(options, error, message):
    with pytest.raises(error, match=f"^{message}\n\nhint: "):
        ZeroOneSchedule(**options)


DIFFERENT = [
    (OneBitAdam, {"warmup": 5}, {"warmup": 6}, r"warmup=5.*warmup=6"),
    (OneBitLamb, {"trust_beta": 0.9}, {"trust_beta": 0.8}, ""),
    (
        ZeroOneAdam,
        {"schedule": ZeroOneSchedule(8)},
        {"schedule": ZeroOneSchedule(9)},
        "",
    ),
    (
        DropCompute,
        {"micro_batches": 4, "threshold": 1.0},
        {"micro_batches": 4, "threshold": 2.0},
        "threshold=1,.*threshold=2,",
    ),
    (LocalSGD, {"local_steps": 2}, {"local_steps": 3}, "local_steps=2.*local_steps=3"),
    *((CO2, {}, {name: value}, "") for name, value in (("gap", 2.5), ("clip", None), ("delay", 0))),
    (A2CiD2, {"gossip_rate": 1}, {"gossip_rate": 2}, "gossip_rate=1.*gossip_rate=2"),
    (SAPS, {"seed": 0}, {"seed": 1}, ""),
    (SAPS, {"bandwidth": np.ones((2, 2))}, {"bandwidth": np.full((2, 2), 2.0)}, ""),
    (SelSync, {"threshold": 0.1}, {"threshold": 1.1}, "threshold=0.1.*threshold=1.1"),
]


@pytest.mark.parametrize(("kind", "own", "other", "message"), DIFFERENT)
def test_options_that_differ_between_ranks_are_an_error_on_all(kind, own, other, message):
    optimizers = [
        build(kind, Group(rank, 2), **options) for rank, options in enumerate((own, other))
    ]

    def error_of(optimizer):
        with pytest.raises(ValueError, match=f"(?s)optimizers of ranks 0 and 1 differ.*{message}"):
            yield from optimizer.broadcast_model_algorithm()

    lockstep([error_of(optimizer) for optimizer in optimizers])
