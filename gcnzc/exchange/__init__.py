"""Distributed algorithms: their requests, the groups of ranks that execute them, a simulator."""

from gcnzc.exchange.agreement import RequestMismatch
from gcnzc.exchange.collectives import (
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Mean,
    ReduceScatter,
    SendReceive,
    Sum,
    among,
)
from gcnzc.exchange.engine import Ledger
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.group import Group, current_group
from gcnzc.exchange.init import init_group
from gcnzc.exchange.launch import is_worker
from gcnzc.exchange.processes import run
from gcnzc.exchange.requests import (
    Abandon,
    Algorithm,
    Caller,
    CompareAndSet,
    Compute,
    DeleteKeys,
    First,
    Now,
    ReadKeys,
    Receive,
    Request,
    Send,
    Start,
    Wait,
    WaitForKey,
)
from gcnzc.exchange.simulated_network import Crash, Link, Outcome, SlowDown
from gcnzc.exchange.simulation import lockstep

__all__ = [
    "Abandon",
    "Algorithm",
    "AllGather",
    "AllGatherScalar",
    "AllToAll",
    "Broadcast",
    "Caller",
    "CompareAndSet",
    "Compute",
    "Crash",
    "DeleteKeys",
    "First",
    "Group",
    "Ledger",
    "Link",
    "Mean",
    "Now",
    "Outcome",
    "ReadKeys",
    "Receive",
    "ReduceScatter",
    "Request",
    "RequestMismatch",
    "Send",
    "SendReceive",
    "SlowDown",
    "Start",
    "Sum",
    "Wait",
    "WaitForKey",
    "WorkerLost",
    "among",
    "current_group",
    "init_group",
    "is_worker",
    "lockstep",
    "run",
]
