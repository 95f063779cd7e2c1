"""Every optimizer of `gcnzc.optim`, of a model and a group, with options for short runs."""

import math
from functools import partial

import torch

from gcnzc.compress import Blocks, Dense, RandomBlock, RandomK, Sign, Threshold, TopK
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

LR = 0.01
# steps 5, 6 and 7 are local, then three of four
WITH_LOCAL_STEPS = ZeroOneSchedule(warmup=3, local_doubling=1, max_local_interval=4)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR)


def averaged(compress=None):
    return lambda model, group, **options: Averaged(
        adamw(model), group, compress=compress, **options
    )


class GivenGradients(DropCompute):
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


def drop_compute(compress=None):
    return lambda model, group, **options: GivenGradients(
        adamw(model), group, micro_batches=4, threshold=None, compress=compress, **options
    )


def replicated(kind, **own):
    return lambda model, group, **options: kind(
        model.parameters(), LR, group=group, **own, **options
    )


def around(kind, **own):
    return lambda model, group, **options: kind(adamw(model), group, **own, **options)


def local(kind, **own):
    return around(kind, local_steps=4, **own)


AVERAGED = {
    "averaged": averaged(),
    "averaged int8": averaged(Blocks("int8")),
    "averaged sign": averaged(Sign(block=32)),
    "drop-compute": drop_compute(),
    "drop-compute sign": drop_compute(Sign(block=32)),
    "averaged randomk": averaged(RandomK(0.8)),
    "averaged threshold": averaged(Threshold(0.2)),
}
REPLICATED = {
    "onebit-adam": replicated(OneBitAdam, warmup=3),
    "onebit-adam warm-up": replicated(OneBitAdam, warmup=1000),
    "onebit-lamb": replicated(OneBitLamb, warmup=3),
    "zero-one-adam": replicated(ZeroOneAdam),
}
ZERO_ONE_LOCAL = {"zero-one-adam local steps": replicated(ZeroOneAdam, schedule=WITH_LOCAL_STEPS)}


def set_gradients(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


class WithGivenGradients(FedGLOMO):
    """FedGLOMO whose closure sets the gradients that the caller computed before the step."""

    name = "FedGLOMO"

    def algorithm(self):
        parameters = self.flat.parameters
        gradients = [None if each.grad is None else each.grad.clone() for each in parameters]
        self.closure = partial(set_gradients, parameters, gradients)
        return super().algorithm()


def with_closure(**own):
    """FedGLOMO, which needs a closure and SGD, in the loops of the other optimizers."""

    def make(model, group, **options):
        inner = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.01)
        return WithGivenGradients(inner, group, **own, **options)

    return make


LOCAL = {
    "local-sgd": local(LocalSGD),
    "diloco": local(DiLoCo),
    "diloco sharded": local(DiLoCo, sharded=True),
    "streaming-diloco": local(StreamingDiLoCo, fragments=2),
    "co2": local(CO2),
    "co2 sharded": local(CO2, sharded=True),
    # with asynchronous=True its receives belong to one simulation: test_overlapped_gossip.py
    "a2cid2": around(A2CiD2, control_interval=2),
    "saps": around(SAPS, density=0.5, control_interval=4),
    "selsync": around(SelSync, window=2, threshold=0.01),
    # tests call collectives after any step, so all ranks must take part in all rounds
    "backup-workers": around(
        BackupWorkers, topology="complete", grace=math.inf, control_interval=2
    ),
    # with a quorum of fewer ranks, tests would wait in collectives for ranks that miss rounds
    "diloco quorum": lambda model, group, **options: local(
        DecoupledDiLoCo, quorum=group.world_size, control_interval=2
    )(model, group, **options),
}
WITH_CLOSURE = {"fedglomo": with_closure(local_steps=4)}
"""which take local steps of SGD without momentum, with a closure"""
LOCAL |= WITH_CLOSURE
EVERY_STEP = AVERAGED | REPLICATED
"""whose ranks exchange in every step"""
FIXED_LAYOUT = REPLICATED | ZERO_ONE_LOCAL | LOCAL
"""which refuse parameters that are frozen or unfrozen later"""
KINDS = AVERAGED | FIXED_LAYOUT

HALF, SIGN = Dense(torch.float16), Sign(block=64)
EAGER = {"gap": "none", "eager": 0.5}


def of_muon(kind):
    return lambda model, group, **options: kind(
        Muon(model.parameters(), lr=0.01), group, local_steps=3, **options
    )


# other options of local strategies, with other states and messages
LOCAL_VARIANTS = {
    "local-sgd half": local(LocalSGD, compress=HALF),
    "local-sgd sign": local(LocalSGD, compress=SIGN),
    "local-sgd block": local(LocalSGD, compress=RandomBlock(0.3)),
    "local-sgd muon": of_muon(LocalSGD),
    "diloco half": local(DiLoCo, compress=HALF),
    "diloco sign": local(DiLoCo, compress=SIGN),
    "muloco": of_muon(MuLoCo),
    "sparseloco": local(SparseLoCo, compress=TopK.sparse_loco(0.1)),
    "streaming half": local(StreamingDiLoCo, fragments=5, delay=3, compress=HALF),
    "streaming sign": local(StreamingDiLoCo, fragments=2, delay=3, compress=SIGN),
    "streaming random": local(
        StreamingDiLoCo, fragments=3, delay=2, compress=Blocks("int4", stochastic=True)
    ),
    "streaming topk": local(StreamingDiLoCo, fragments=2, compress=TopK(0.2, "layer")),
    "co2 in sync": local(CO2, eager=0.0),
    "co2 half": local(CO2, eager=0.0, compress=HALF),
    "co2 at once": local(CO2, eager=0.0, delay=0, sharded=True),
    "co2 eager": local(CO2, **EAGER),
    "co2 eager sharded": local(CO2, **EAGER, sharded=True),
    "co2 eager sign": local(CO2, **EAGER, compress=SIGN),
    "a2cid2 plain": around(A2CiD2, eta=0.0, topology="complete"),
    "saps measured": around(SAPS, density=0.25, probe_interval=3),
    "selsync sign": around(SelSync, window=3, threshold=0.3, compress=SIGN),
}
VARIANTS = LOCAL_VARIANTS | {
    "fedglomo of one participant": with_closure(local_steps=3, participants=1),
    "averaged topk": averaged(TopK(0.1, "layer", "int2")),
    "averaged refreshed threshold": averaged(Threshold(0.1, refresh=3)),
    "onebit-adam refresh": replicated(OneBitAdam, warmup=4, refresh=3),
    "onebit-adam topk": replicated(OneBitAdam, warmup=2, compress=TopK(0.2, "layer")),
    "onebit-adam automatic": replicated(OneBitAdam, warmup=None, betas=(0.9, 0.5)),
    "onebit-lamb refresh": replicated(OneBitLamb, warmup=4, reactivate="refresh"),
}
CASES = KINDS | VARIANTS
"""all, with options that have other states or messages"""
LOCAL_CASES = LOCAL | ZERO_ONE_LOCAL | LOCAL_VARIANTS
