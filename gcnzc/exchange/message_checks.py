"""Check a message before it is sent or received."""

from gcnzc.exchange.requests import Message


def check_message(message: Message, rank: int, world_size: int) -> None:
    """Check a `Send` or `Receive` of an algorithm.

    Args:
        message: the request.
        rank: this rank.
        world_size: the number of ranks.

    Raises:
        ValueError: the peer is this rank or none of the others, or the values are not contiguous.
    """
    if message.peer == rank or not 0 <= message.peer < world_size:
        raise ValueError(
            f"{message.describe()} on rank {rank} of {world_size}\n\n"
            f"hint: give a rank from 0 to {world_size - 1} that is not {rank}"
        )
    if not message.values.is_contiguous():
        raise ValueError(
            f"{message.describe()}: the values, of shape {tuple(message.values.shape)}, are not "
            "contiguous\n\nhint: send values.contiguous(), or receive into a contiguous tensor "
            "and copy it"
        )
