"""List all error messages that have a hint, from the source code.

    python -m bench.docs.messages [FILE]     write them as Markdown, to stdout or into a file

The documentation includes this list. It is generated when the site is built, and is not in git.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HINT = "\n\nhint: "
# title of a section to the folders with its messages
PARTS = {
    "Files and datasets": ("datasets", "gcnzc/graph"),
    "Features": ("gcnzc/features", "gcnzc/system", "kernels"),
    "Sampling, loading and models": ("gcnzc/sampling", "gcnzc/loader", "gcnzc/models"),
    "Training runs and options": ("gcnzc/train", "gcnzc/cli", "gcnzc/tune"),
    "Several workers and optimizers": ("gcnzc/exchange", "gcnzc/optim", "gcnzc/compress"),
    "DGL, PyG, GraphBolt and Lightning": ("gcnzc/interop",),
}


def main() -> None:
    """Write the list."""
    text = "\n".join(lines())
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)
    else:
        print(text)


def lines() -> Iterator[str]:
    """Yield the lines of a heading and a table for each section."""
    for title, folders in PARTS.items():
        yield f"### {title}\n"
        yield "| Message | Remedy |"
        yield "| --- | --- |"
        found = {pair for folder in folders for pair in messages_of(ROOT / folder)}
        for message, remedy in sorted(found, key=lambda pair: pair[0].lower().strip("`{")):
            yield f"| {message} | {remedy} |"
        yield ""


def messages_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the messages of a folder's modules, each with its hint."""
    for path in sorted(folder.rglob("*.py")):
        if any(parent.is_symlink() for parent in path.parents):
            continue
        for text in texts_of(ast.parse(path.read_text())):
            message, hint, remedy = text.partition(HINT)
            # skip messages whose text is only known at run time
            if hint and re.search("[a-z]{3}", re.sub(r"\{.*?\}", "", message)):
                yield cell(message), cell(remedy)


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module, with the names of values in braces."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(value) for value in ast.walk(node) if value is not node}
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(map(text_of, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def text_of(value: ast.expr) -> str:
    """Return the text of a piece of an f-string, or the last name of its value."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    assert isinstance(value, ast.FormattedValue)
    inner = value.value
    if isinstance(inner, ast.Attribute):
        return f"{{{inner.attr}}}"
    return f"{{{inner.id}}}" if isinstance(inner, ast.Name) else "{...}"


def cell(text: str) -> str:
    """Return a text on one line, with Markdown's special characters escaped."""
    parts = re.split("(`[^`]*`)", " ".join(text.split()))
    escaped = (
        part if part.startswith("`") and len(part) > 1 else re.sub(r"([*_\[\]<>#])", r"\\\1", part)
        for part in parts
    )
    # MyST reads {name} before code as the name of a role
    return re.sub(r"\{(\w+)\}`", r"\\{\1}`", "".join(escaped)).replace("|", "\\|")


if __name__ == "__main__":
    main()
