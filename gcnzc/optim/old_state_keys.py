"""Rename the keys of states that older versions saved."""

import re
from collections.abc import Mapping
from typing import Any

# old and present keys in `shared` -> `numbers` and `vectors`, and in `local`
KEYS = {
    "awake": "had_gradient",
    "fresh_at": "refreshed_at",
    "join_from": "reactivate_from",
    "join_gap": "reactivation_interval",
    "left_out": "num_nonfinite",
    "lengths": "lr_sums",
    "refreshes": "num_variance_updates",
    "waiting": "pending_gradients",
    "wakes": "has_inactive_gradient",
}
# old and present keys of pending exchanges in `shared`
PENDING_KEYS = {
    r"told": "extra_sums",
    r"blame": "skip_reason",
    r"flight (\d+) blame": r"fragment \1 skip_reason",
    r"flight (\d+) (due|values|workers)": r"fragment \1 \2",
}


def rename_keys(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot with the present keys; tensors and numbers are not copied."""
    renamed = dict(snapshot)
    if isinstance(shared := snapshot.get("shared"), Mapping):
        renamed["shared"] = {_pending_key(key): value for key, value in shared.items()}
        for name in ("numbers", "vectors"):
            if isinstance(values := shared.get(name), Mapping):
                renamed["shared"][name] = _rename(values)
    if isinstance(local := snapshot.get("local"), Mapping):
        renamed["local"] = _rename(local)
    return renamed


def _rename(values: Mapping[str, Any]) -> dict[str, Any]:
    return {KEYS.get(key, key): value for key, value in values.items()}


def _pending_key(key: str) -> str:
    for old, present in PENDING_KEYS.items():
        if match := re.fullmatch(old, key):
            return match.expand(present)
    return key
