"""When workers exchange, and what is done with it."""

from gcnzc.optim.averaged import Averaged
from gcnzc.optim.co2 import CO2
from gcnzc.optim.ddp import leave_local
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.exchanging import Exchanging, LatePhaseWarning
from gcnzc.optim.local_sgd import LocalSGD
from gcnzc.optim.local_updates import LocalUpdates
from gcnzc.optim.one_bit_adam import OneBitAdam
from gcnzc.optim.one_bit_lamb import OneBitLamb
from gcnzc.optim.replicated import Replicated
from gcnzc.optim.states import resized
from gcnzc.optim.streaming_diloco import StreamingDiLoCo
from gcnzc.optim.zero_one_adam import ZeroOneAdam, ZeroOneSchedule

__all__ = [
    "CO2",
    "Averaged",
    "DiLoCo",
    "Exchanging",
    "LatePhaseWarning",
    "LocalSGD",
    "LocalUpdates",
    "OneBitAdam",
    "OneBitLamb",
    "Replicated",
    "StreamingDiLoCo",
    "ZeroOneAdam",
    "ZeroOneSchedule",
    "leave_local",
    "resized",
]
