"""A strategy of your own: GASLoC, a method of 2026, compared with DiLoCo on simulated networks.

    python examples/gasloc.py

It is written as docs/howto/write_a_strategy.md describes.
"""

import argparse

import torch
from torch import nn

from gcnzc.exchange import Compute, Group, Link, SendReceive, lockstep
from gcnzc.optim import DiLoCo, LocalMethod, option, vector


class GASLoC(LocalMethod):
    """GASLoC: take local steps, and average with one random peer, with an outer momentum.

    Cagnasso, Belilovsky, Oyallon: Unifying Local Communications and Local Updates for LLM
    Pretraining, arXiv:2606.11081, 2026. In round t, rank i takes H local steps from theta_t to
    theta_t + g_t. With u_t = theta_t + eta g_t, its next parameters are

        theta_t+1 = u_t - alpha Lambda u_t + gamma (u_t - u_t-1).

    Lambda is the Laplacian of the pairs of the round: rank i with peer j has (u_i - u_j) / 2 as
    its elements of Lambda u, and a rank without a peer has zeros. If u is equal on all ranks,
    this is DiLoCo with Nesterov momentum gamma.

    The paper's text was not available. The update is from the summary docs/math/gasloc.md of
    github.com/junaidaliop/zij. The defaults, and the first u_t-1, which is theta_0, are those of
    `DiLoCo`. A rank with a peer whose u is not finite ignores it, and the peer continues from
    this rank's u.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate.
        local_steps: H.
        outer_lr: eta.
        outer_momentum: gamma.
        gossip_rate: alpha; with 1, peers get the mean of their u.
        seed: random seed of the pairs.
        control_interval: the number of exchanges from one sum of signals over all ranks to the
            next. Between them, a rank waits for its peers only.
        options: the other options of `LocalMethod`.
    """

    local_steps = option(12)
    outer_lr = option(0.4)
    outer_momentum = option(0.9)
    gossip_rate = option(1.0)
    seed = option(0)
    control_interval = option(10)

    theta = vector(kind="local", resize="mean")
    u = vector(kind="local", resize="mean")

    def restart(self):
        """See `LocalMethod`."""
        self.theta = self.parameters
        self.u = self.parameters

    def find_due(self, step):
        """See `LocalMethod`: an exchange with a peer in place of a mean."""
        if step % self.local_steps == 0:
            if self.num_exchanges % self.control_interval == 0:
                yield from self.sum_common()
            yield from self.gossip()
            self.num_exchanges += 1
        return []  # no mean over all ranks

    def gossip(self):
        """Take the outer step, with the peer's u."""
        u = torch.lerp(self.theta, self.parameters, self.outer_lr)
        peers = yield SendReceive(u, self.find_peer())
        if not peers.isfinite().all():
            peers = u
        elif not u.isfinite().all():
            u = self.u = peers
        theta = u - self.gossip_rate / 2 * (u - peers) + self.outer_momentum * (u - self.u)
        self.theta, self.u, self.parameters = theta, u, theta

    def find_peer(self):
        """Return this rank's peer in the current round; its own rank if there is none."""
        pairs = torch.Generator().manual_seed(self.seed + 100_003 * self.num_exchanges)
        order = torch.randperm(self.group.world_size, generator=pairs).tolist()
        position = order.index(self.group.rank) ^ 1
        return order[position] if position < len(order) else self.group.rank


def train(wrap, rank, world_size, steps, same_data=False):
    """Return the accuracy, the number of exchanges and the parameters of a rank."""
    torch.manual_seed(0)
    teacher = nn.Linear(20, 4)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01), Group(rank, world_size))
    samples = torch.Generator().manual_seed(1 if same_data else 1 + rank)
    for _ in range(steps):
        rows = torch.randn(32, 20, generator=samples)
        loss = nn.functional.cross_entropy(model(rows), teacher(rows).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        yield Compute(0.001)  # the seconds of a forward and backward pass
        yield from optimizer.algorithm()
    exchanges = optimizer.num_exchanges
    yield from optimizer.finalize_algorithm()
    rows = torch.randn(4000, 20, generator=torch.Generator().manual_seed(999))
    accuracy = (model(rows).argmax(1) == teacher(rows).argmax(1)).float().mean().item()
    return accuracy, exchanges, optimizer.parameters


def simulate(wrap, world_size, steps, links=None, **options):
    """Return the outcome of a run of all ranks with a virtual clock."""
    ranks = [train(wrap, rank, world_size, steps, **options) for rank in range(world_size)]
    return lockstep(ranks, links)


def main():
    """Print the figures of both methods on both networks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=144)
    options = parser.parse_args()
    fast, slow = Link(12.5e6, 0.001), Link(1.25e6, 0.001)  # 100 and 10 Mbit/s, 1 ms
    networks = {
        "100 Mbit/s": [fast] * options.ranks,
        "one rank 10 Mbit/s": [slow] + [fast] * (options.ranks - 1),
    }
    for network, links in networks.items():
        for method in (DiLoCo, GASLoC):
            outcome = simulate(method, options.ranks, options.steps, links)
            accuracy, exchanges, _ = outcome.results[0]
            seconds = sorted(outcome.seconds)[options.ranks // 2]
            sent = max(ledger.bytes_sent for ledger in outcome.ledgers)
            print(
                f"{network}, {method.__name__}: accuracy {accuracy:.3f}, {exchanges} exchanges, "
                f"{sent:,} bytes sent, {seconds:.3f} s"
            )


if __name__ == "__main__":
    main()
