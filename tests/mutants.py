"""Variants of a module, each without one statement that calls something."""

import ast
from pathlib import Path

import pytest


def assert_each_call_is_needed(module, name, kind, is_found):
    """Check that a class of a module without any one of its calls of a name is found to be wrong.

    Args:
        name: of the calls, as in `find_calls`.
        kind: the class.
        is_found: called once per call, while the module has a class without it.
    """
    lines = find_calls(module, name)
    assert lines
    for line in lines:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, kind, without_call(module, line)[kind])
            found = is_found()
        assert found, f"nothing is found without line {line} of {Path(module.__file__).name}"


def find_calls(module, name):
    """Return the lines of statements that only call a name, as `append` or `readers.append`."""
    tree = ast.parse(Path(module.__file__).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return sorted(
        {
            node.lineno
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and f".{ast.unparse(node.value.func)}".endswith(f".{name}")
        }
    )


def without_call(module, line):
    """Return the names of a module without the call at a line.

    Names that were replaced in the module are replaced in the variant, too.
    """
    tree = ast.parse(Path(module.__file__).read_text())
    names = dict(vars(module))
    own = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    exec(compile(_Without(line).visit(tree), module.__file__, "exec"), names)
    # in place, since the functions of the variant look names up here
    names.update({name: value for name, value in vars(module).items() if name not in own})
    return names


class _Without(ast.NodeTransformer):
    def __init__(self, line):
        self.line = line

    def visit_Expr(self, node):
        if node.lineno == self.line and isinstance(node.value, ast.Call):
            return ast.copy_location(ast.Pass(), node)
        return node
