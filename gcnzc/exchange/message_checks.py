"""Check a message before it is sent or received."""

from gcnzc.exchange.requests import Receive, Send


def check_message(message: Send | Receive, rank: int, world_size: int) -> None:
    """Check a `Send` or `Receive` of an algorithm.

    Args:
        message: the request.
        rank: this rank.
        world_size: the number of ranks.

    Raises:
        ValueError: the peer is this rank or does not exist, or the message is invalid; see
            `Message.check`.
    """
    if message.peer == rank or not 0 <= message.peer < world_size:
        raise ValueError(
            f"{message.describe()} on rank {rank} of {world_size}\n\n"
            f"hint: give a rank from 0 to {world_size - 1} that is not {rank}"
        )
    message.check()
