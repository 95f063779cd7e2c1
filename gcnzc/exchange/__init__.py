"""Distributed algorithms: their requests, the groups of ranks that execute them, a simulator."""

from gcnzc.exchange.agreement import RequestMismatch
from gcnzc.exchange.choices import Choices
from gcnzc.exchange.collectives import (
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Mean,
    ReduceScatter,
    SendReceive,
    Subgroup,
    Sum,
)
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.group import Group, current_group, run
from gcnzc.exchange.init import init_group
from gcnzc.exchange.launch import is_worker
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.lockstep import Outcome, lockstep
from gcnzc.exchange.requests import (
    Abandon,
    Algorithm,
    Caller,
    Compute,
    First,
    Now,
    Receive,
    ReceiveAny,
    Request,
    Scratch,
    Send,
    Start,
    Wait,
)
from gcnzc.exchange.simulated_network import Crash, Link, SlowDown
from gcnzc.exchange.size_only import SizeOnly
from gcnzc.exchange.store_requests import CompareAndSet, DeleteKeys, ReadKeys, WaitForKey

__all__ = [
    "Abandon",
    "Algorithm",
    "AllGather",
    "AllGatherScalar",
    "AllToAll",
    "Broadcast",
    "Caller",
    "Choices",
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
    "ReceiveAny",
    "ReduceScatter",
    "Request",
    "RequestMismatch",
    "Scratch",
    "Send",
    "SendReceive",
    "SizeOnly",
    "SlowDown",
    "Start",
    "Subgroup",
    "Sum",
    "Wait",
    "WaitForKey",
    "WorkerLost",
    "current_group",
    "init_group",
    "is_worker",
    "lockstep",
    "run",
]
