"""Optimizers that exchange gradients or updates between ranks."""

from gcnzc.optim.ddp import keep_gradients_local
from gcnzc.optim.embedding.base import RowOptimizer
from gcnzc.optim.embedding.rules import SparseAdagrad, SparseAdam, SparseSGD
from gcnzc.optim.late_phase import LatePhaseWarning
from gcnzc.optim.local.co2 import CO2, co2
from gcnzc.optim.local.diloco import DiLoCo, diloco
from gcnzc.optim.local.local_sgd import LocalSGD, local_sgd
from gcnzc.optim.local.muloco import MuLoCo
from gcnzc.optim.local.sparse_loco import SparseLoCo
from gcnzc.optim.local.streaming_diloco import StreamingDiLoCo, streaming_diloco
from gcnzc.optim.method import DistributedOptimizer
from gcnzc.optim.muon import Muon
from gcnzc.optim.resize import resize_state
from gcnzc.optim.state_layout import SavedTensor
from gcnzc.optim.strategy.a2cid2 import a2cid2
from gcnzc.optim.strategy.all_ranks import AllRanks
from gcnzc.optim.strategy.backup_workers import backup_workers
from gcnzc.optim.strategy.every_interval import EveryInterval
from gcnzc.optim.strategy.fedglomo import fedglomo
from gcnzc.optim.strategy.parameter_mean import DifferenceMean, ParameterMean
from gcnzc.optim.strategy.recipe import (
    BaseExchange,
    BaseUpdate,
    Exchange,
    LocalStep,
    Policy,
    Recipe,
    RecipePart,
    Update,
)
from gcnzc.optim.strategy.saps_psgd import saps
from gcnzc.optim.strategy.selsync import selsync
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.synchronous.averaged import Averaged
from gcnzc.optim.synchronous.base import Replicated
from gcnzc.optim.synchronous.drop_compute import DropCompute
from gcnzc.optim.synchronous.one_bit_adam import OneBitAdam
from gcnzc.optim.synchronous.one_bit_lamb import OneBitLamb
from gcnzc.optim.synchronous.zero_one_adam import ZeroOneAdam
from gcnzc.optim.synchronous.zero_one_schedule import ZeroOneSchedule

__all__ = [
    "CO2",
    "AllRanks",
    "Averaged",
    "BaseExchange",
    "BaseUpdate",
    "DiLoCo",
    "DifferenceMean",
    "DistributedOptimizer",
    "DropCompute",
    "EveryInterval",
    "Exchange",
    "LatePhaseWarning",
    "LocalSGD",
    "LocalStep",
    "MuLoCo",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "ParameterMean",
    "Policy",
    "Recipe",
    "RecipePart",
    "Replicated",
    "RowOptimizer",
    "SavedTensor",
    "SparseAdagrad",
    "SparseAdam",
    "SparseLoCo",
    "SparseSGD",
    "Strategy",
    "StreamingDiLoCo",
    "Update",
    "ZeroOneAdam",
    "ZeroOneSchedule",
    "a2cid2",
    "backup_workers",
    "co2",
    "diloco",
    "fedglomo",
    "keep_gradients_local",
    "local_sgd",
    "resize_state",
    "saps",
    "selsync",
    "streaming_diloco",
]
