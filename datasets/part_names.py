"""The names that data sets and libraries give to the training, validation and test nodes."""

import re

_NAMES = {
    "train": ("train", "training", "trn"),
    "valid": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "tst"),
}
_PART_OF = {name: part for part, names in _NAMES.items() for name in names}
_AROUND = re.compile(r"^(?:is_|in_|mask_)|(?:_mask|_masks|_idx|_nodes|_set|_split)$")


def part_of(name: object) -> str | None:
    """Return "train", "valid" or "test" for a common name of it; None for other names.

    Such names are "train", "train_mask", "is_train", "val", "validation_mask", "dev" and "testing",
    in upper or lower case.
    """
    word = str(name).strip().lower().replace("-", "_").replace(" ", "_")
    for _ in range(2):
        word = _AROUND.sub("", word)
    return _PART_OF.get(word)
