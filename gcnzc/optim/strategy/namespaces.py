"""Names of channels and store keys that belong to one optimizer of a group."""

from collections import Counter
from weakref import WeakKeyDictionary

from gcnzc.exchange import Group

_CLAIMS: "WeakKeyDictionary[Group, Counter[str]]" = WeakKeyDictionary()


def claim_namespace(group: Group, identity: str) -> str:
    """Return a prefix for the names of channels and keys, different from all others of the group.

    An optimizer claims it before it first uses a channel or a key. Copies have the same identity,
    but each copy that communicates has a prefix of its own. Prefixes are the same on all ranks if
    the optimizers and their copies first communicate in the same order; otherwise the ranks open
    channels of different names, which is a `RequestMismatch`.

    Args:
        group: the ranks that communicate.
        identity: the identity of the optimizer.
    """
    claims = _CLAIMS.setdefault(group, Counter())
    claims[identity] += 1
    number = claims[identity] - 1
    return f"{identity} copy {number}" if number else identity
