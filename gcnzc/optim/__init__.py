"""Optimizers that exchange gradients or updates between ranks."""

from gcnzc.optim.co2 import CO2
from gcnzc.optim.ddp import keep_gradients_local
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.embedding.base import RowOptimizer
from gcnzc.optim.embedding.rules import SparseAdagrad, SparseAdam, SparseSGD
from gcnzc.optim.late_phase import LatePhaseWarning
from gcnzc.optim.local_method import Fragment, LocalMethod
from gcnzc.optim.local_sgd import LocalSGD
from gcnzc.optim.method import DistributedOptimizer
from gcnzc.optim.muloco import MuLoCo
from gcnzc.optim.muon import Muon
from gcnzc.optim.resize import resize_state
from gcnzc.optim.selsync import SelSync
from gcnzc.optim.sparse_loco import SparseLoCo
from gcnzc.optim.state import Number, Option, Vector
from gcnzc.optim.strategy.a2cid2 import a2cid2
from gcnzc.optim.strategy.backup_workers import backup_workers
from gcnzc.optim.strategy.fedglomo import fedglomo
from gcnzc.optim.strategy.quorum import diloco
from gcnzc.optim.strategy.recipe import Recipe
from gcnzc.optim.strategy.saps_psgd import saps
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.streaming_diloco import StreamingDiLoCo
from gcnzc.optim.synchronous.averaged import Averaged
from gcnzc.optim.synchronous.drop_compute import DropCompute
from gcnzc.optim.synchronous.gradient import Replicated
from gcnzc.optim.synchronous.one_bit_adam import OneBitAdam
from gcnzc.optim.synchronous.one_bit_lamb import OneBitLamb
from gcnzc.optim.synchronous.zero_one_adam import ZeroOneAdam
from gcnzc.optim.synchronous.zero_one_schedule import ZeroOneSchedule

__all__ = [
    "CO2",
    "Averaged",
    "DiLoCo",
    "DistributedOptimizer",
    "DropCompute",
    "Fragment",
    "LatePhaseWarning",
    "LocalMethod",
    "LocalSGD",
    "MuLoCo",
    "Muon",
    "Number",
    "OneBitAdam",
    "OneBitLamb",
    "Option",
    "Recipe",
    "Replicated",
    "RowOptimizer",
    "SelSync",
    "SparseAdagrad",
    "SparseAdam",
    "SparseLoCo",
    "SparseSGD",
    "Strategy",
    "StreamingDiLoCo",
    "Vector",
    "ZeroOneAdam",
    "ZeroOneSchedule",
    "a2cid2",
    "backup_workers",
    "diloco",
    "fedglomo",
    "keep_gradients_local",
    "resize_state",
    "saps",
]
