"""Words that the project no longer uses, in code, documentation and help."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("gcnzc", "kernels", "datasets")
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# in prose and in names; each with what to write instead
RETIRED = {
    r"foretell\w*|foretold": "predict; held-out edges",
    r"made alike|alike on all": "in sync",
    r"hot (set|sets|row|rows)|hot_\w+|\w+_hot": "feature cache, cached rows",
    r"asleep|awake|sleepers?": "inactive, active, reactivate",
    r"heard|overheard": "received",
    r"whomever|whoever": "a subject",
    r"sign of life|signs of life": "heartbeat",
    r"let go of|lets go of": "release",
    r"made ahead|drawn ahead": "prefetched",
    r"beside the (steps|model)": "overlapped with compute",
    r"set apart|rows apart": "padded rows",
    r"cards? (that )?cuts?": "segmentation offload",
    r"tells? one another|tells? each other": "exchange",
    r"as usual|the usual": "default",
}
# names of a private meaning, which are also plain English
NAMES = {
    *("told", "heard", "asks", "blame", "blamed", "flight", "launched", "landed", "drained"),
    *("asleep", "awake", "sleepers", "pace", "hot", "foretold", "weigh", "attend", "settle"),
    *("Space", "Place", "Part", "Way", "Vote", "Swap", "Form", "Codes", "Keeper", "Siblings"),
    *("way", "ways", "room", "form", "plan", "crew", "drawn", "ours", "loyal", "apart"),
    *("Carrier", "Draw", "Maker", "Turns", "made_maker", "torchs", "sorted_places", "columns_of"),
    *("attributes_of", "left_out", "without_type", "handed_over", "read_first"),
    *("on_lines", "room_bytes", "slots_of", "programs_of", "count_into", "count_marked"),
    *("lanes_of", "check_apart", "measured_link", "measured_layouts", "modelled"),
}
EXCEPTIONS = {"docs/log.md"}  # history


def prose(path):
    """The sentences of a page or of a module's comments and strings, without code."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = "\n".join(
            token.string
            for token in tokens
            if token.type == tokenize.COMMENT
            # a single word is a key of a format, such as that of a state
            or (token.type == tokenize.STRING and re.search(r"\s", token.string))
        )
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def relative(path):
    return str(path.relative_to(ROOT))


def test_retired_words_are_not_used():
    found, pattern = [], re.compile(rf"\b({'|'.join(RETIRED)})\b", re.IGNORECASE)
    for path in (*SOURCES, *PAGES):
        # prose is found only in the few files that have a word at all
        if relative(path) not in EXCEPTIONS and pattern.search(path.read_text()):
            found += [f"{relative(path)}: {match[0]}" for match in pattern.finditer(prose(path))]
    assert not found, f"the words to use: {RETIRED}"


def test_retired_names_are_not_used():
    found = [
        f"{relative(path)}:{line}: {name}"
        for path in SOURCES
        if relative(path) not in EXCEPTIONS
        for name, line in names(path)
        if name.lstrip("_") in NAMES
    ]
    assert not found
