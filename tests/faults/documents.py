"""The code blocks of the README and the docs, taken from the Markdown as they stand.

What a block leaves to its reader, the dots, becomes a call of `faults.dots.here`. Nothing else is changed,
but for the controls, which take one option out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """One fenced block, found by the file and the heading it stands under."""

    file: str
    heading: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.language} block of {self.file}, {self.heading!r}"

    @property
    def lines(self) -> list[str]:
        """The commands of a console block."""
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]


def all_blocks() -> list[Block]:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [block for file in files for block in blocks_of(file)]


def blocks_of(file: Path) -> Iterator[Block]:
    heading, language, lines = "", None, []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            if language is None:
                language, lines = line.removeprefix("```"), []
            else:
                yield Block(str(file.relative_to(ROOT)), heading, language, "\n".join(lines) + "\n")
                language = None
        elif language is not None:
            lines.append(line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    assert language is None, f"{file.name}: a block does not end"


def block(file: str, heading: str, language: str) -> Block:
    (found,) = [
        each for each in all_blocks() if (each.file, each.heading, each.language) == (file, heading, language)
    ]
    return found


def table(file: str, first_cell: str) -> list[list[str]]:
    """The rows of the table whose head begins with a cell, without the head."""
    lines = iter((ROOT / file).read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(f"| {first_cell} |"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


# Python.


def filled_in(source: str) -> str:
    """Put calls where the dots stand: but for the bodies of classes, where dots mean nothing more."""
    return ast.unparse(ast.fix_missing_locations(_Dots().visit(ast.parse(source))))


class _Dots(ast.NodeTransformer):
    def __init__(self) -> None:
        self._where = ["block"]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._inside(node.name, node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        return self._inside(f"except {ast.unparse(node.type)}", node)

    def _inside(self, where: str, node: ast.AST) -> ast.AST:
        self._where.append(where)
        try:
            return self.generic_visit(node)
        finally:
            self._where.pop()

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if isinstance(node.value, ast.Constant) and node.value.value is ...:
            node.value = ast.parse(f"here({self._where[-1]!r})", mode="eval").body
        return node


def tasks_of(source: str) -> dict[str, list[str]]:
    """The tasks that are defined somewhere, with the lock options that they are given."""
    return {
        node.name: [keyword.arg for keyword in call.keywords if keyword.arg not in (None, "bind")]
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call)
    }


def without(source: str, task: str, option: str) -> str:
    """The functions of a source, of which one task has lost an option."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for call in function.decorator_list:
            if function.name == task and isinstance(call, ast.Call):
                call.keywords = [keyword for keyword in call.keywords if keyword.arg != option]
    return "\n\n".join(map(ast.unparse, functions))
