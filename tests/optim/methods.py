"""The table of methods: how each is constructed for short runs, and what laws expect of it."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gcnzc import optim
from gcnzc.compress import Blocks, Dense, RandomBlock, RandomK, Sign, Threshold, TopK

from .teams import adamw, diverse, of_group

LR = 0.01


@dataclass(frozen=True)
class Method:
    """A method with options for short runs."""

    family: str
    """averaged: around any optimizer, with its state; replicated: updates the parameters itself;
    local: takes steps of an inner optimizer between exchanges"""
    kind: Any
    """a class, or a function that constructs it"""
    options: dict[str, Any] = field(default_factory=dict)
    limit: dict[str, Any] | None = None
    """further options with which the method is data parallel training"""
    limit_ranks: tuple[int, ...] = (2, 3, 4)
    """for which that holds: averages of pairs or of neighbors are none over more ranks"""
    inner: Any = adamw
    every_step: bool = True
    """whether ranks exchange in every step"""
    signals: tuple[int, ...] = tuple(range(4, 13))
    """the steps of 12 that receive a signal which one rank gives from step 4 on"""
    is_in_sync: bool = False
    """whether ranks have the same parameters after every fourth step, and no other"""

    def make(self, model, group, inner=None, **options):
        """Construct it for a model, around another optimizer than `inner` if one is given."""
        options = self.options | options
        if self.family == "replicated":
            return self.kind(model.parameters(), LR, group=group, **options)
        return self.kind((inner or self.inner)(model.parameters()), group, **options)

    def team(self, world_size, dtype=torch.float32, **options):
        """Models that differ until the first step, and their optimizers."""
        models = diverse(world_size, dtype)
        return models, self.optimizers(models, **options)

    def optimizers(self, models, **options):
        """Optimizers of the models of all ranks."""
        return of_group(models, partial(self.make, **options))


class GivenGradients(optim.DropCompute):
    """Takes the gradients as the mean over its micro-batches, as `Averaged` does."""

    def algorithm(self):
        limit = self.deadline.micro_batches
        for _ in self.micro_batches(range(limit)):
            pass
        self.weight *= limit
        try:
            yield from super().algorithm()
        finally:
            self.weight /= limit


def set_all(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


class WithGivenGradients(optim.FedGLOMO):
    """FedGLOMO whose closure sets the gradients that the caller computed before the step."""

    name = "FedGLOMO"

    def algorithm(self):
        parameters = self.flat.parameters
        gradients = [None if each.grad is None else each.grad.clone() for each in parameters]
        self.closure = partial(set_all, parameters, gradients)
        return super().algorithm()


def quorum_of_all(inner, group, **options):
    # with fewer ranks, tests would wait in collectives for ranks that miss rounds
    return optim.DecoupledDiLoCo(inner, group, quorum=group.world_size, **options)


def of_vectors(parameters, lr, **options):
    """1-bit Adam whose groups of matrices have `compress=False`."""
    groups = [{"params": [each], "compress": each.ndim == 1} for each in parameters]
    return optim.OneBitAdam(groups, lr, **options)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR, weight_decay=0.01)


def muon(parameters):
    return optim.Muon(parameters, lr=LR)


def averaged(**options):
    limit = options.pop("limit", None)
    return Method("averaged", optim.Averaged, options, limit)


def with_density_of_one(compress):
    return {"compress": compress, "momentum": "everywhere"}


def replicated(kind, limit=None, every_step=True, signals=Method.signals, **options):
    return Method("replicated", kind, options, limit, every_step=every_step, signals=signals)


def local(kind, steps=4, **options):
    """A method with local steps; those of `Method` are among the options."""
    own = {name: options.pop(name) for name in Method.__dataclass_fields__ if name in options}
    options |= {"local_steps": steps} if steps else {}
    return Method("local", kind, options, every_step=False, **own)


HALF, SIGN = Dense(torch.float16), Sign(block=64)
PLAIN = {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
AT_ONCE = PLAIN | {"delay": 0}
EACH_MEAN = {"signals": (4, 8, 12), "is_in_sync": True}
# steps 5, 6 and 7 are local, then three of four
WITH_LOCAL_STEPS = optim.ZeroOneSchedule(warmup=3, local_doubling=1, max_local_interval=4)
EAGER = {"gap": "none", "eager": 0.5}

METHODS = {
    "averaged": averaged(limit={}),
    "averaged int8": averaged(compress=Blocks("int8")),
    "averaged sign": averaged(compress=Sign(block=32)),
    "averaged randomk": averaged(compress=RandomK(0.8), limit=with_density_of_one(RandomK(1.0))),
    "averaged threshold": averaged(
        compress=Threshold(0.2), limit=with_density_of_one(Threshold(1.0, refresh=1))
    ),
    "drop-compute": Method(
        "averaged", GivenGradients, {"micro_batches": 4, "threshold": None}, limit={}
    ),
    "drop-compute sign": Method(
        "averaged",
        GivenGradients,
        {"micro_batches": 4, "threshold": None, "compress": Sign(block=32)},
    ),
    "onebit-adam": replicated(optim.OneBitAdam, warmup=3, limit={"warmup": 1000}),
    "onebit-adam warm-up": replicated(optim.OneBitAdam, warmup=1000),
    "onebit-lamb": replicated(optim.OneBitLamb, warmup=3),
    "zero-one-adam": replicated(
        optim.ZeroOneAdam, limit={"schedule": optim.ZeroOneSchedule(None, variance_doubling=10**9)}
    ),
    "zero-one-adam local steps": replicated(
        optim.ZeroOneAdam, schedule=WITH_LOCAL_STEPS, every_step=False, signals=(4, 5, 8, 9, 12)
    ),
    "local-sgd": local(optim.LocalSGD, limit={"local_steps": 1}, **EACH_MEAN),
    "diloco": local(optim.DiLoCo, limit=PLAIN, **EACH_MEAN),
    "diloco sharded": local(optim.DiLoCo, sharded=True, limit=PLAIN, **EACH_MEAN),
    "streaming-diloco": local(
        optim.StreamingDiLoCo, fragments=2, limit=AT_ONCE | {"mixing": 0.0}, signals=(5, 7, 9, 11)
    ),
    "co2": local(optim.CO2, limit=AT_ONCE | {"eager": 0.0}, signals=(8, 12)),
    "co2 sharded": local(optim.CO2, sharded=True, limit=AT_ONCE | {"eager": 0.0}, signals=(8, 12)),
    # with asynchronous=True its receives belong to one simulation: test_a2cid2.py
    "a2cid2": local(
        optim.A2CiD2,
        steps=0,
        control_interval=2,
        limit={"eta": 0.0},
        limit_ranks=(2,),
        signals=(4, 6, 8, 10, 12),
    ),
    "saps": local(
        optim.SAPS,
        steps=0,
        density=0.5,
        control_interval=4,
        limit={"density": 1.0},
        limit_ranks=(2,),
        signals=(4, 8, 12),
    ),
    "selsync": local(optim.SelSync, steps=0, window=2, threshold=0.01, limit={"threshold": 0.0}),
    # tests call collectives after any step, so all ranks must take part in all rounds
    "backup-workers": local(
        optim.BackupWorkers,
        steps=0,
        topology="complete",
        grace=math.inf,
        control_interval=2,
        limit={},
        signals=(7, 11),
    ),
    "diloco quorum": local(
        quorum_of_all, control_interval=2, limit=PLAIN, is_in_sync=True, signals=(7, 11)
    ),
    # local steps of SGD without momentum, with a closure
    "fedglomo": local(
        WithGivenGradients,
        inner=plain_sgd,
        limit={"local_steps": 1, "round_weight": 1.0, "compress": None},
        **EACH_MEAN,
    ),
}

# other options, with other states or messages
VARIANTS = {
    "local-sgd half": local(optim.LocalSGD, compress=HALF, is_in_sync=True),
    "local-sgd sign": local(optim.LocalSGD, compress=SIGN),
    "local-sgd block": local(optim.LocalSGD, compress=RandomBlock(0.3)),
    "local-sgd muon": local(optim.LocalSGD, steps=3, inner=muon),
    "diloco half": local(optim.DiLoCo, compress=HALF),
    "diloco sign": local(optim.DiLoCo, compress=SIGN, is_in_sync=True),
    "muloco": local(optim.MuLoCo, steps=3, inner=muon, limit=PLAIN | {"compress": None}),
    "sparseloco": local(
        optim.SparseLoCo,
        compress=TopK.sparse_loco(0.1),
        limit={"local_steps": 1, "compress": TopK(1.0)},
    ),
    "streaming half": local(optim.StreamingDiLoCo, fragments=5, delay=3, compress=HALF),
    "streaming sign": local(optim.StreamingDiLoCo, fragments=2, delay=3, compress=SIGN),
    "streaming random": local(
        optim.StreamingDiLoCo, fragments=3, delay=2, compress=Blocks("int4", stochastic=True)
    ),
    "streaming topk": local(
        optim.StreamingDiLoCo,
        fragments=2,
        compress=TopK(0.2, "layer"),
        limit=AT_ONCE | {"mixing": 0.0, "compress": TopK(1.0), "fragments": 1},
    ),
    "co2 in sync": local(optim.CO2, eager=0.0, is_in_sync=True),
    "co2 half": local(optim.CO2, eager=0.0, compress=HALF, is_in_sync=True),
    "co2 at once": local(optim.CO2, eager=0.0, delay=0, sharded=True, is_in_sync=True),
    "co2 eager": local(optim.CO2, **EAGER),
    "co2 eager sharded": local(optim.CO2, **EAGER, sharded=True),
    "co2 eager sign": local(optim.CO2, **EAGER, compress=SIGN),
    "a2cid2 plain": local(optim.A2CiD2, steps=0, eta=0.0, topology="complete"),
    "saps measured": local(optim.SAPS, steps=0, density=0.25, probe_interval=3),
    "selsync sign": local(optim.SelSync, steps=0, window=3, threshold=0.3, compress=SIGN),
    "fedglomo of one participant": local(
        WithGivenGradients, steps=3, participants=1, inner=plain_sgd
    ),
    "averaged topk": averaged(
        compress=TopK(0.1, "layer", "int2"), limit=with_density_of_one(TopK(1.0))
    ),
    "averaged block": averaged(
        compress=RandomBlock(0.3), limit=with_density_of_one(RandomBlock(1.0))
    ),
    "averaged refreshed threshold": averaged(compress=Threshold(0.1, refresh=3)),
    "onebit-adam refresh": replicated(optim.OneBitAdam, warmup=4, refresh=3),
    "onebit-adam of vectors": replicated(of_vectors, warmup=3),
    "onebit-adam topk": replicated(of_vectors, warmup=2, compress=TopK(0.2, "layer")),
    "onebit-adam randomk": replicated(optim.OneBitAdam, warmup=2, compress=RandomK(0.2)),
    "onebit-adam threshold": replicated(optim.OneBitAdam, warmup=2, compress=Threshold(0.2)),
    "onebit-adam random": replicated(
        of_vectors, warmup=2, gradient_compression=Blocks("int8", stochastic=True)
    ),
    "onebit-adam automatic": replicated(optim.OneBitAdam, warmup=None, betas=(0.9, 0.5)),
    "onebit-lamb refresh": replicated(optim.OneBitLamb, warmup=4, reactivate="refresh"),
}
CASES = METHODS | VARIANTS


def names(*families, among=METHODS):
    """The names of the methods of some families."""
    return [name for name, method in among.items() if method.family in families]


EVERY_STEP = [name for name, method in METHODS.items() if method.every_step]
AVERAGED, LOCAL = names("averaged"), names("local")
REPLICATED = [name for name in EVERY_STEP if name not in AVERAGED]
FIXED_LAYOUT = names("replicated", "local")
"""which refuse parameters that are frozen or unfrozen later"""
LOCAL_CASES = names("local", among=CASES)
