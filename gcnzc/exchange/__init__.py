"""Exchange between ranks: requests, algorithms, and groups that execute them."""

from gcnzc.exchange.agreement import RequestMismatch
from gcnzc.exchange.choices import Choices
from gcnzc.exchange.errors import WorkerLost
from gcnzc.exchange.group import Group, joined, present, run
from gcnzc.exchange.ledger import Ledger
from gcnzc.exchange.lockstep import Link, Outcome, lockstep
from gcnzc.exchange.measure import tuned
from gcnzc.exchange.requests import (
    Algorithm,
    AllGather,
    AllToAll,
    Begin,
    Broadcast,
    Compute,
    End,
    Mean,
    Receive,
    ReduceScatter,
    Request,
    Scratch,
    Send,
    Sum,
    Swap,
    Vote,
)
from gcnzc.exchange.start import is_worker
from gcnzc.exchange.tuner import Tuning

__all__ = [
    "Algorithm",
    "AllGather",
    "AllToAll",
    "Begin",
    "Broadcast",
    "Choices",
    "Compute",
    "End",
    "Group",
    "Ledger",
    "Link",
    "Mean",
    "Outcome",
    "Receive",
    "ReduceScatter",
    "Request",
    "RequestMismatch",
    "Scratch",
    "Send",
    "Sum",
    "Swap",
    "Tuning",
    "Vote",
    "WorkerLost",
    "is_worker",
    "joined",
    "lockstep",
    "present",
    "run",
    "tuned",
]
