"""States change in one function of each class, which logs the change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import aiolock

SOURCES = sorted(Path(aiolock.__file__).parent.rglob("*.py"))
TRANSITIONS = ("become", "_become")


def assignments(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.AST | None, int]]:
    """Yield the function and the line of each assignment to a state."""
    for node in ast.iter_child_nodes(tree):
        inside = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("state", "_state")
            and isinstance(node.ctx, ast.Store)
        ):
            yield inside, node.lineno
        yield from assignments(node, inside)


def logs(function: ast.AST) -> bool:
    """Test whether the function logs at DEBUG."""
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".debug", "log_change"))
        for node in ast.walk(function)
    )


def test_a_state_is_assigned_by_one_function_which_logs_it():
    starts, transitions, wrong = 0, 0, []
    for path in SOURCES:
        for function, line in assignments(ast.parse(path.read_text())):
            name = getattr(function, "name", "")
            if name == "__init__":
                starts += 1
            elif name in TRANSITIONS and function is not None and logs(function):
                transitions += 1
            else:
                wrong.append(f"{path}:{line}, in {name or 'no function'}")
    assert wrong == []
    assert starts == transitions >= 8


def test_an_assignment_elsewhere_would_be_found():
    tree = ast.parse(
        "class A:\n    def go(self):\n        other, self.state = 1, 2\n        self.lost = self.state\n"
    )
    [(function, line)] = assignments(tree)
    assert (getattr(function, "name", ""), line) == ("go", 3)
    assert function is not None
    assert not logs(function)
