"""Settings of the documentation site; `make docs` builds it."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.docs import messages  # noqa: E402
from gcnzc import __version__ as release  # noqa: E402

project = "gcnzc"
copyright = "the authors of gcnzc"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_generated"]

html_theme = "furo"
html_title = f"gcnzc {release}"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_block", "deflist"]
# a copied block has no prompts and no output
copybutton_prompt_text = r">>> |\.\.\. |\$ |# "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

# docstrings write `code` with single backticks
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
# types in signatures: internal ones, and those of libraries whose pages cannot be reached
nitpick_ignore_regex = [("py:(class|obj|exc)", ".*")]

GENERATED = Path(__file__).parent / "_generated"
GENERATED.mkdir(exist_ok=True)
(GENERATED / "messages.md").write_text("\n".join(messages.lines()))


def keep_returns_whole(
    app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Stop napoleon from taking the text before a colon for a type: of results and of options."""
    if what == "attribute" and name.startswith("gcnzc.train.config."):
        lines[:1] = [f": {line}" for line in lines[:1]]
    for number in reversed(range(len(lines))):
        if lines[number].strip() in ("Returns:", "Yields:"):
            indent = len(lines[number]) - len(lines[number].lstrip()) + 4
            lines.insert(number + 1, " " * indent + "\N{ZERO WIDTH SPACE}")


def setup(app: Any) -> None:
    """Register the hook, before napoleon's."""
    app.connect("autodoc-process-docstring", keep_returns_whole, priority=100)
