"""Read the keyword arguments of a class or function from its source, without importing it.

`gcnzc --help` and the check of `--strategy diloco:local_steps=12` therefore take milliseconds,
although the class needs torch. Types are those of the signature, and help that of the docstring.
"""

import ast
import functools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None)}
# types of the library that text can express; the value is converted when it is built
_TEXT = ("Compression", "EdgeType", "GossipGraph")
_Parameter: TypeAlias = tuple[str, ast.expr | None, ast.expr | None]


@dataclass(frozen=True)
class Argument:
    """A keyword argument: the types that text can express, its default as source, and its help."""

    kinds: tuple[Any, ...]
    default: str | None
    """None if it is required"""
    help: str = ""


@dataclass(frozen=True)
class Signature:
    """The first sentence of a docstring, and the arguments that have a default or are required."""

    summary: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)


@functools.cache
def read(target: str) -> Signature:
    """Read the signature of `module:name`.

    A class without `__init__`, or whose `__init__` has `**options`, has the arguments of its bases.
    """
    found: dict[str, Argument] = {}
    for each in reversed(_ancestry(target)):
        found = _extend(found, *each.split(":"))
    text = ast.get_docstring(_definition(*target.split(":"))) or ""
    return Signature(" ".join(text.partition("\n\n")[0].split()), found)


def docstrings(module: str, name: str) -> dict[str, str]:
    """Return the docstring of each field of a class: the text that follows its annotation."""
    return {
        ast.unparse(declared.target): " ".join(str(text.value.value).split())
        for declared, text in pairwise(_definition(module, name).body)
        if isinstance(declared, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _ancestry(target: str) -> list[str]:
    """Return a class and its bases, each before its own bases; a function alone."""
    module, name = target.split(":")
    bases = [_resolve(module, each) for each in getattr(_definition(module, name), "bases", ())]
    found = [target, *(each for base in bases if base for each in _ancestry(base))]
    # a base of several of these classes is after all of them
    return [each for place, each in enumerate(found) if each not in found[place + 1 :]]


def _extend(inherited: Mapping[str, Argument], module: str, name: str) -> dict[str, Argument]:
    """Return the arguments of a class or function, given those of the bases."""
    node, found = _definition(module, name), dict(inherited)
    helps = {key: each.help for key, each in found.items()}
    if isinstance(node, ast.ClassDef):
        function: Any = next((each for each in node.body if _is_init(each)), None)
        pairs = [*_parameters(function.args), *_declared(node)] if function else [*_declared(node)]
        if function is not None and not function.args.kwarg:
            found = {}
        for each in node.body:  # an option of the base that has a fixed value here
            targets = getattr(each, "targets", [getattr(each, "target", None)])
            for assigned in targets if getattr(each, "value", None) else ():
                found.pop(getattr(assigned, "id", ""), None)
    else:
        pairs = [*_parameters(node.args)]
    helps |= _documented(module, ast.get_docstring(node) or "")
    for key, annotation, default in pairs:
        source = None if default is None else _constant(module, default)
        found[key] = Argument(_kinds(module, annotation), source)
    return {key: replace(each, help=helps.get(key, "")) for key, each in found.items()}


def _is_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _declared(node: ast.ClassDef) -> Iterator[_Parameter]:
    """Yield name, annotation and default of the options of a class; see `gcnzc.optim.options`."""
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.value, ast.Call):
            continue
        if getattr(each.value.func, "id", "") == "option":
            named = {key.arg: key.value for key in each.value.keywords}
            name = named["name"] if "name" in named else ast.Constant(ast.unparse(each.target))
            default = each.value.args[0] if each.value.args else None
            yield ast.literal_eval(name), each.annotation, default


def _parameters(given: ast.arguments) -> Iterator[_Parameter]:
    """Yield name, annotation and default of each argument with a default, or by keyword only."""
    positional = [*given.posonlyargs, *given.args]
    with_default = positional[len(positional) - len(given.defaults) :]
    pairs: list[tuple[ast.arg, ast.expr | None]] = [*zip(with_default, given.defaults, strict=True)]
    pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    for each, default in pairs:
        yield each.arg, each.annotation, default


def _documented(module: str, text: str) -> dict[str, str]:
    """Return the help of each argument in the section `Args` of a docstring.

    The help of an argument whose text begins or ends with "see `SAGE`" is that of this class. With
    "The arguments are those of `SAGE`" in the docstring, so is the help of all others.
    """
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE)
    lines = textwrap.dedent(section[1]) if section else ""
    found = re.findall(r"^(\w+(?:,\s+\w+)*): (.*(?:\n[ ]+.*)*)", lines, re.MULTILINE)
    helps = {
        name: " ".join(words.split()) for names, words in found for name in re.split(r",\s+", names)
    }
    for name, words in helps.items():
        other = re.search(r"^see `(\w+)`|; see `(\w+)`\.?$", words)
        if other and (target := _resolve(module, ast.Name(other[1] or other[2]))):
            helps[name] = read(target).arguments.get(name, Argument((), None)).help
    others = re.search(r"The arguments are those of `(\w+)`", text)
    if others and (target := _resolve(module, ast.Name(others[1]))):
        helps = {name: each.help for name, each in read(target).arguments.items()} | helps
    return helps


@functools.cache
def _tree(module: str) -> ast.Module | None:
    top, *rest = module.split(".")
    # of the top-level package alone, because that of a submodule would import its parents
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        path = path.parent.joinpath(*rest)
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")) if path.exists() else None


def _body(module: str) -> list[ast.stmt]:
    tree = _tree(module)
    return tree.body if tree is not None else []


def _definition(module: str, name: str) -> Any:
    for node in _body(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"{module} has no {name}")


def _imported(module: str, name: str) -> tuple[str, str] | None:
    """Return the module that a name is imported from, and its name there."""
    for each in _body(module):
        if isinstance(each, ast.ImportFrom) and each.module:
            for alias in each.names:
                if (alias.asname or alias.name) == name:
                    return each.module, alias.name
    return None


def _resolve(module: str, node: ast.expr) -> str:
    """Return `module:name` of a base class in the same package; "" for another."""
    if not isinstance(node, ast.Name):
        return ""
    if any(isinstance(each, ast.ClassDef) and each.name == node.id for each in _body(module)):
        return f"{module}:{node.id}"
    found = _imported(module, node.id)
    if found is None or found[0].split(".")[0] != module.split(".")[0]:
        return ""
    return _resolve(found[0], ast.Name(found[1]))


def _assigned(module: str, name: str) -> tuple[str, ast.expr] | None:
    """Find what a name is assigned in a module, or in the one that it is imported from."""
    for each in _body(module):
        targets: Sequence[ast.expr] = each.targets if isinstance(each, ast.Assign) else ()
        if isinstance(each, ast.AnnAssign):
            targets = (each.target,)
        is_it = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        value = getattr(each, "value", None)
        if is_it and value is not None:
            return module, value
    found = _imported(module, name)
    return _assigned(*found) if found is not None else None


def _constant(module: str, node: ast.expr) -> str:
    """Return the source of a default; a constant, or a field of one, is replaced by its value."""
    if isinstance(node, ast.Name) and (found := _assigned(module, node.id)):
        return _constant(*found)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = _assigned(module, node.value.id)
        if found and isinstance(found[1], ast.Call) and isinstance(found[1].func, ast.Name):
            return _field(*found, node.attr)
    return ast.unparse(node)


def _field(module: str, call: Any, name: str) -> str:
    """Return the source of a field of a dataclass that is built by a call."""
    body = _definition(module, call.func.id).body
    fields = {ast.unparse(each.target): each.value for each in body if hasattr(each, "annotation")}
    given = dict(zip(fields, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords}
    return _constant(module, (fields | given)[name])


def _kinds(module: str, node: ast.expr | None) -> tuple[Any, ...]:
    """Return the types of an annotation that text can express; () if there are none."""
    if isinstance(node, ast.BinOp):
        return _kinds(module, node.left) + _kinds(module, node.right)
    if isinstance(node, ast.Constant):
        return (type(None),) if node.value is None else ()
    if isinstance(node, ast.Name):
        if node.id in _SIMPLE:
            return (_SIMPLE[node.id],)
        if node.id in _TEXT:
            return (type(None), str)
        if node.id == "Any":  # a number or a word
            return (int, float, type(None), str)
        found = _assigned(module, node.id)
        return _kinds(*found) if found else ()
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        items = ast.unparse(node.slice)
        if node.value.id == "Literal":
            return (Literal[ast.literal_eval(node.slice)],)
        if node.value.id in ("Sequence", "tuple"):
            item = next((kind for kind in ("int", "float", "str") if kind in items), None)
            kinds: dict[str, Any] = {"int": tuple[int, ...], "float": tuple[float, ...]}
            if isinstance(node.slice, ast.Tuple) and "..." not in items:
                kinds = {"int": tuple[int, int], "float": tuple[float, float]}
            return (kinds.get(item, tuple[str, ...]),) if item else ()
    return ()
