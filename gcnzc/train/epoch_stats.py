"""Statistics of one epoch: loss, accuracy, times and bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGather
from gcnzc.system.spans import Seconds, Span, Stage

# times that every epoch's line has, also if they are 0
TIMES = ("sample_s", "gather_s", "wait_s", "compute_s", "exchange_s", "hidden_s")


COUNTS = (
    "seeds",
    "steps",
    "skipped_in_a_row",
    "bytes",
    "bytes_sent",
    "seeds_checksum",
    "hits",
    "peer_hits",
    "minibatches",
    "dropped",
)


SUMS = ("loss", "right")


def seeds_checksum(seeds: Tensor) -> int:
    """Return the sum of the SplitMix64 hashes of all seeds, modulo 2**64, in any order.

    The checksums of minibatches add up to the checksum of their epoch, regardless of which rank
    used them. A seed that is missing or used twice changes it.

    Args:
        seeds: (S,) int64 on the host: ids of nodes, or numbers of edges in link prediction.
    """
    mixed = seeds.numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


class EpochStats:
    """Sums over the steps of one epoch on one worker; part of a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        # float64 on the device, so that an addition does not synchronize with it
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.right = torch.zeros((), dtype=torch.float64, device=device)
        # bytes: those of the gathered feature rows (`payload_bytes` of the record)
        self.seeds = self.steps = self.bytes = 0
        # the last steps without this worker's gradients, also those of earlier epochs
        self.skipped_in_a_row = 0
        self.bytes_sent = 0  # payload of all messages to other workers
        self.seeds_checksum = 0  # modulo 2**64
        # rows read from the feature cache, and those of them read from another worker's GPU
        self.hits: int | Tensor = 0
        self.peer_hits: int | Tensor = 0
        # with DropCompute: the minibatches of the steps, and those of them that were dropped
        self.minibatches = self.dropped = 0
        self.seconds = Seconds(dict.fromkeys(TIMES, 0.0))

    def add(self, logits: Tensor, loss: Tensor, labels: Tensor, seeds: Tensor) -> None:
        """Add the loss and accuracy of one minibatch.

        Args:
            logits: (B, C) of classes or label columns, or (B,) of pairs of nodes, on any device.
            loss: (), the mean over the minibatch.
            labels: (B,) classes, (B, C) label columns, or (B,) labels of pairs, 0 or 1.
            seeds: (S,) int64 on the host, see `seeds_checksum`; B, or fewer in link prediction.
        """
        self.loss += loss.double() * len(labels)
        if labels.ndim == 1:
            # one logit per pair of nodes, or one per class
            predicted = logits > 0 if logits.ndim == 1 else logits.argmax(dim=1)
            self.right += (predicted == labels).sum()
        self.seeds += len(labels)
        self.seeds_checksum = (self.seeds_checksum + seeds_checksum(seeds)) % 2**64

    def time(
        self, times: Mapping[str, float], stages: Sequence[Stage], waits: Sequence[Span]
    ) -> None:
        """Add the seconds of one step.

        Args:
            times: seconds that were measured on the threads of the loader.
            stages: stages of the training thread, and gathers on the loader's streams.
            waits: waits for other workers, which are subtracted from the time of `compute`.
        """
        for name, seconds in times.items():
            self.seconds.add_seconds(name, seconds)
        self.seconds.add(stages)
        for wait in waits:
            self.seconds.add_seconds("exchange_s", wait.end_s - wait.begin_s)
            self.seconds.add_seconds("compute_s", wait.begin_s - wait.end_s)

    def of_all_workers(self) -> Algorithm[list["EpochStats"]]:
        """Gather the statistics of all workers, in the order of ranks."""
        state = self.state_dict()
        # integers are gathered separately, because float64 cannot represent 64-bit checksums
        counts = yield AllGather(torch.tensor([_signed(state[name]) for name in COUNTS]))
        sums = [state[name] for name in SUMS]
        times = state["times"]
        rows = yield AllGather(torch.tensor([*sums, *times.values()], dtype=torch.float64))
        tallies = []
        for whole, real in zip(counts.tolist(), rows.tolist(), strict=True):
            tally = EpochStats(self.loss.device)
            values = dict(zip(COUNTS, whole, strict=True)) | dict(zip(SUMS, real, strict=False))
            seconds = dict(zip(times, real[len(SUMS) :], strict=True))
            tally.load_state_dict(values | {"times": seconds})
            tallies.append(tally)
        return tallies

    def format_progress(self, has_accuracy: bool) -> str:
        """Format the statistics for the progress bar; see `figures`."""
        times = self.seconds.all()
        spent = sum(times[name] for name in ("wait_s", "compute_s", "exchange_s"))
        busy, seeds = max(spent, 1e-9), max(self.seeds, 1)
        rate = format_rate(self.bytes / max(times["gather_s"], 1e-9))
        accuracy = f"minibatch accuracy {self.right.item() / seeds:.4f}  " if has_accuracy else ""
        dropped = f"  dropped {self.dropped_share:.0%}" if self.minibatches else ""
        return (
            f"loss {self.loss.item() / seeds:.4f}  {accuracy}"
            f"{self.seeds / busy:,.0f} seeds/s  gather {rate}{dropped}"
        )

    @property
    def dropped_share(self) -> float:
        """The fraction of the minibatches that DropCompute has dropped."""
        return self.dropped / self.minibatches if self.minibatches else 0.0

    def figures(self, has_accuracy: bool, workers: int = 1) -> dict[str, Any]:
        """Return the epoch's line of the record, with times that are means over the workers.

        Args:
            has_accuracy: False if there are several labels per node.
            workers: number of workers whose sums these are.
        """
        line: dict[str, Any] = {"loss": self.loss.item() / self.seeds, "steps": self.steps}
        if has_accuracy:
            # with dropout, and with weights that change after each minibatch, unlike the
            # train_accuracy of an evaluation
            line["minibatch_accuracy"] = self.right.item() / self.seeds
        times = {name: seconds / workers for name, seconds in self.seconds.all().items()}
        line["epoch_s"] = times["wait_s"] + times["compute_s"] + times["exchange_s"]
        line |= times | {"seeds": self.seeds, "seeds_checksum": f"{self.seeds_checksum:016x}"}
        if self.minibatches:
            line["dropped_share"] = self.dropped_share
        return line | {"payload_bytes": self.bytes, "bytes_sent": self.bytes_sent}

    def state_dict(self) -> dict[str, Any]:
        """Return all sums as Python numbers."""
        counts = {name: int(getattr(self, name)) for name in COUNTS}
        sums = {name: getattr(self, name).item() for name in SUMS}
        return counts | sums | {"times": self.seconds.all()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums from `state_dict`."""
        for name in SUMS:
            getattr(self, name).fill_(state[name])
        for name in COUNTS:
            setattr(self, name, state[name])
        self.seeds_checksum %= 2**64
        self.seconds = Seconds(dict(state["times"]))


def sum_stats(tallies: Sequence[EpochStats]) -> EpochStats:
    """Add up the statistics of workers.

    `steps` is the maximum, because all take the same steps. `skipped_in_a_row` is the minimum, the
    steps that no worker's gradients changed.
    """
    states = [tally.state_dict() for tally in tallies]
    whole = {name: sum(state[name] for state in states) for name in (*COUNTS, *SUMS)}
    whole["steps"] = max(state["steps"] for state in states)
    whole["skipped_in_a_row"] = min(state["skipped_in_a_row"] for state in states)
    names = states[0]["times"]
    times = {name: sum(state["times"][name] for state in states) for name in names}
    total = EpochStats(tallies[0].loss.device)
    total.load_state_dict(whole | {"times": times})
    return total


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in GB/s, or in MB/s below 0.1 GB/s."""
    if bytes_per_s < 1e8:
        return f"{bytes_per_s / 1e6:.1f} MB/s"
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def _signed(count: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return count - 2**64 if count >= 2**63 else count
