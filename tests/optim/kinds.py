"""Every optimizer of `gcnzc.optim`, of a model and a group, with options for short runs."""

import torch

from gcnzc.compress import Blocks
from gcnzc.optim import (
    CO2,
    Averaged,
    DiLoCo,
    LocalSGD,
    OneBitAdam,
    OneBitLamb,
    StreamingDiLoCo,
    ZeroOneAdam,
)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


AVERAGED = {
    "averaged": lambda model, group, **options: Averaged(adam(model), group, **options),
    "averaged int8": lambda model, group, **options: Averaged(
        adam(model), group, compress=Blocks("int8"), **options
    ),
}
REPLICATED = {
    "onebit-adam": lambda model, group, **options: OneBitAdam(
        model.parameters(), warmup=3, group=group, **options
    ),
    "onebit-lamb": lambda model, group, **options: OneBitLamb(
        model.parameters(), warmup=3, group=group, **options
    ),
    "zero-one-adam": lambda model, group, **options: ZeroOneAdam(
        model.parameters(), group=group, **options
    ),
}
LOCAL = {
    "local-sgd": lambda model, group, **options: LocalSGD(
        adam(model), group, local_steps=4, **options
    ),
    "diloco": lambda model, group, **options: DiLoCo(adam(model), group, local_steps=4, **options),
    "streaming-diloco": lambda model, group, **options: StreamingDiLoCo(
        adam(model), group, local_steps=4, fragments=2, **options
    ),
    "co2": lambda model, group, **options: CO2(adam(model), group, local_steps=4, **options),
}
EVERY_STEP = AVERAGED | REPLICATED
KINDS = EVERY_STEP | LOCAL
