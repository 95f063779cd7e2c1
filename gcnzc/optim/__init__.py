"""Optimizers that exchange gradients or updates between ranks."""

from gcnzc.optim.a2cid2 import A2CiD2
from gcnzc.optim.averaged import Averaged
from gcnzc.optim.backup_workers import BackupWorkers
from gcnzc.optim.co2 import CO2
from gcnzc.optim.ddp import keep_gradients_local
from gcnzc.optim.decoupled_diloco import DecoupledDiLoCo
from gcnzc.optim.diloco import DiLoCo
from gcnzc.optim.drop_compute import DropCompute
from gcnzc.optim.embedding.base import RowOptimizer
from gcnzc.optim.embedding.rules import SparseAdagrad, SparseAdam, SparseSGD
from gcnzc.optim.fedglomo import FedGLOMO
from gcnzc.optim.local_method import Fragment, LocalMethod, outer_vector
from gcnzc.optim.local_sgd import LocalSGD
from gcnzc.optim.method import DistributedOptimizer, LatePhaseWarning
from gcnzc.optim.muloco import MuLoCo
from gcnzc.optim.muon import Muon
from gcnzc.optim.one_bit_adam import OneBitAdam
from gcnzc.optim.one_bit_lamb import OneBitLamb
from gcnzc.optim.options import option
from gcnzc.optim.replicated import Replicated
from gcnzc.optim.resize import resize_state
from gcnzc.optim.saps import SAPS
from gcnzc.optim.selsync import SelSync
from gcnzc.optim.sparse_loco import SparseLoCo
from gcnzc.optim.state import scalar, vector
from gcnzc.optim.streaming_diloco import StreamingDiLoCo
from gcnzc.optim.zero_one_adam import ZeroOneAdam, ZeroOneSchedule

__all__ = [
    "CO2",
    "SAPS",
    "A2CiD2",
    "Averaged",
    "BackupWorkers",
    "DecoupledDiLoCo",
    "DiLoCo",
    "DistributedOptimizer",
    "DropCompute",
    "FedGLOMO",
    "Fragment",
    "LatePhaseWarning",
    "LocalMethod",
    "LocalSGD",
    "MuLoCo",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "Replicated",
    "RowOptimizer",
    "SelSync",
    "SparseAdagrad",
    "SparseAdam",
    "SparseLoCo",
    "SparseSGD",
    "StreamingDiLoCo",
    "ZeroOneAdam",
    "ZeroOneSchedule",
    "keep_gradients_local",
    "option",
    "outer_vector",
    "resize_state",
    "scalar",
    "vector",
]
