"""Random seeds that are derived from other numbers."""

import hashlib


def mixed_seed(*numbers: int) -> int:
    """Return a 64-bit seed: a hash of `numbers`."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
