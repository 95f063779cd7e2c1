"""Errors of exchanges between ranks."""

from gcnzc.exchange.heartbeat import HeartbeatMonitor


class WorkerLost(RuntimeError):
    """An exchange failed, because a rank or the network failed, or a rank is far behind."""


class ConnectionBroken(Exception):
    """A request of torch.distributed failed; the cause is torch's error."""


def explain(monitor: HeartbeatMonitor, error: BaseException | None) -> str:
    """Describe the failed ranks, and append the first line of torch's error.

    The other lines of torch's error may be C++ stack frames.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{monitor.describe_failure()} (torch.distributed reports: {lines[0]})"
