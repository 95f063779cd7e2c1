"""Errors of an exchange."""

from gcnzc.exchange.heartbeat import HeartbeatMonitor


class WorkerLost(RuntimeError):
    """An exchange failed, because a worker or the network failed, or a worker is far behind."""


class ConnectionBroken(Exception):
    """The network failed; the cause is torch's error."""


def explain(watch: HeartbeatMonitor, error: BaseException | None) -> str:
    """Describe the missing workers, with the first line of torch's error; C++ frames may follow."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{watch.culprits()} (torch.distributed reports: {lines[0]})"
