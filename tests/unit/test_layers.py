"""The folder `locks` could be a package of its own."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("celery_pglock").origin).parent
LATE_ONLY = {"gevent", "greenlet", "eventlet"}

locks = pytest.mark.parametrize(
    "module", sorted((PACKAGE / "locks").glob("*.py")), ids=lambda path: path.name
)


def imports_of(module: Path) -> list[tuple[str, bool]]:
    """Names of the modules that one imports, absolute, and whether when it is imported itself."""
    tree = ast.parse(module.read_text())
    late = {node for each in ast.walk(tree) if is_late(each) for node in ast.walk(each)}
    names = []
    package = ("celery_pglock", *module.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node not in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            names += [(".".join([*base, each]), node not in late) for each in modules]
    return names


def is_late(node: ast.AST) -> bool:
    """Whether what a node holds is not run when the module is imported."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


@locks
def test_locks_knows_psycopg_and_the_standard_library_only(module: Path) -> None:
    """No Celery, no kombu; gevent and its like only late, by who stops a greenlet or blocks beside one."""
    allowed = sys.stdlib_module_names | {"psycopg", "typing_extensions"}
    for name, at_import in imports_of(module):
        root = name.partition(".")[0]
        if root in LATE_ONLY:
            assert not at_import, f"{module.name} imports {name} when it is imported"
            assert module.name in ("interrupt.py", "native.py")
        elif root == "celery_pglock":
            assert name.startswith("celery_pglock.locks"), f"{module.name} imports {name}"
        else:
            assert root in allowed, f"{module.name} imports {name}"


def test_imports_run_one_way() -> None:
    """No circles between the modules."""
    graph = {}
    for module in PACKAGE.rglob("*.py"):
        parts = ("celery_pglock", *module.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph[name] = {each for each, at_import in imports_of(module) if at_import}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path, name))}"
        for each in graph.get(name, ()):
            visit(each, (*path, name))

    for name in graph:
        visit(name, ())


def test_nothing_imports_an_optional_friend() -> None:
    """`contrib` holds one thin file for each of them, and the package lives without."""
    for module in PACKAGE.rglob("*.py"):
        if "contrib" not in module.parts:
            assert not [name for name, _ in imports_of(module) if "contrib" in name.split(".")]
