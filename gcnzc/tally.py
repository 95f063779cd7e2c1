"""What the steps of one epoch came to: sums that a resumed epoch goes on from."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Algorithm, AllGather
from gcnzc.timeline import Seconds, Span, Stage

# of an epoch, told in any case
TIMES = ("sample_s", "gather_s", "wait_s", "compute_s", "exchange_s", "hidden_s")


class Tally:
    """Sums over the steps of one epoch; what a resumed epoch goes on from."""

    def __init__(self, device: torch.device) -> None:
        # float64 on the device, so that adding needs no wait for it
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.right = torch.zeros((), dtype=torch.float64, device=device)
        self.seeds = self.steps = self.bytes = 0
        # of a cached table, rows that were hot, and of them those that another worker's GPU had
        self.hits: int | Tensor = 0
        self.peer_hits: int | Tensor = 0
        self.seconds = Seconds(dict.fromkeys(TIMES, 0.0))

    def add(self, logits: Tensor, loss: Tensor, labels: Tensor) -> None:
        """Count one minibatch."""
        self.loss += loss.double() * len(labels)
        if labels.ndim == 1:
            # one logit a pair, or one a class
            foretold = logits > 0 if logits.ndim == 1 else logits.argmax(dim=1)
            self.right += (foretold == labels).sum()
        self.seeds += len(labels)

    def time(
        self, times: Mapping[str, float], stages: Sequence[Stage], waits: Sequence[Span]
    ) -> None:
        """Add the seconds of one step: the loader's threads', and of what is measured in place.

        What of the computing was waiting for other workers is taken from it.
        """
        for name, seconds in times.items():
            self.seconds.add_seconds(name, seconds)
        self.seconds.add(stages)
        for wait in waits:
            self.seconds.add_seconds("exchange_s", wait.end_s - wait.begin_s)
            self.seconds.add_seconds("compute_s", wait.begin_s - wait.end_s)

    def summed(self) -> Algorithm["Tally"]:
        """The sums of all workers, but of their steps, which are the same."""
        state = self.state_dict()
        times = state.pop("times")
        mine = torch.tensor([*state.values(), *times.values()], dtype=torch.float64)
        rows = yield AllGather(mine)
        values = rows.sum(dim=0).tolist()
        whole = Tally(self.loss.device)
        plain = dict(zip(state, values, strict=False))
        for name in ("seeds", "steps", "bytes", "hits", "peer_hits"):
            plain[name] = int(plain[name])
        plain["steps"] = max(int(steps) for steps in rows[:, list(state).index("steps")])
        whole.load_state_dict(
            plain | {"times": dict(zip(times, values[len(state) :], strict=True))}
        )
        return whole

    def shown(self) -> str:
        """The figures beside the bar."""
        times = self.seconds.all()
        spent = sum(times[name] for name in ("wait_s", "compute_s", "exchange_s"))
        busy, seeds = max(spent, 1e-9), max(self.seeds, 1)
        rate = self.bytes / 1e9 / max(times["gather_s"], 1e-9)
        return (
            f"loss {self.loss.item() / seeds:.4f}  "
            f"accuracy {self.right.item() / seeds:.4f}  "
            f"{self.seeds / busy:,.0f} seeds/s  gather {rate:.1f} GB/s"
        )

    def figures(self, has_accuracy: bool, workers: int = 1) -> dict[str, Any]:
        """The line of the record, its seconds means over the workers.

        Nodes with several tasks have no accuracy.
        """
        line: dict[str, Any] = {"loss": self.loss.item() / self.seeds, "steps": self.steps}
        if has_accuracy:
            line["train_accuracy"] = self.right.item() / self.seeds
        times = {name: seconds / workers for name, seconds in self.seconds.all().items()}
        line["epoch_s"] = times["wait_s"] + times["compute_s"] + times["exchange_s"]
        return line | times | {"seeds": self.seeds, "payload_bytes": self.bytes}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        own = {name: getattr(self, name) for name in ("seeds", "steps", "bytes")}
        sums = {"loss": self.loss.item(), "right": self.right.item()}
        sums |= {"hits": int(self.hits), "peer_hits": int(self.peer_hits)}
        return own | sums | {"times": self.seconds.all()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.loss.fill_(state["loss"])
        self.right.fill_(state["right"])
        self.seeds, self.steps, self.bytes = state["seeds"], state["steps"], state["bytes"]
        # a checkpoint from before there were hot sets, or split ones, has none
        self.hits, self.peer_hits = state.get("hits", 0), state.get("peer_hits", 0)
        self.seconds = Seconds(dict.fromkeys(TIMES, 0.0) | state["times"])
