"""Find the training loop in the user's own source: which lines make or ask for the next batch.

Besides the head of the loop and `next(…)`, assignments in its body make batches. Names are followed
back from the model's call to where they are set: before the call or, if they are set nowhere before
it, later in the previous iteration. Which call is the model's can't be inferred from the source: a
run reports the lines it is called in. Where it reports none, names are followed from the backward
pass and from the optimizer's step.
"""

from __future__ import annotations

import ast
import linecache
import os
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FrameType

from accel.profiler.interruptions import ACCEL

_LIBRARY = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
        if path
    }
)


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a source file is the user's: not Python's, not an installed package's, not accel's."""
    if file.startswith(("<", ACCEL)) or "site-packages" in file or "dist-packages" in file:
        return False
    return not os.path.realpath(file).startswith(_LIBRARY)


def users_frames(frame: FrameType | None) -> list[tuple[str, int]]:
    """Return file and line of the user's frames in a stack, the innermost first."""
    frames = []
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            frames.append((file, frame.f_lineno or 0))  # None in code without a line of its own
        frame = frame.f_back
    return frames


def source(file: str, line: int) -> str:
    """Return a line's text without its indentation, '' if there is none."""
    return linecache.getline(file, line).strip() if line > 0 else ""


@lru_cache(maxsize=64)
def _parsed(file: str) -> tuple[StepBody, ...]:
    """Return a file's loops and functions."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, StepBody))


def _around(file: str, line: int) -> tuple[list[Loop], list[StepBody]]:
    """Return the loops around a line within its function, and that function."""
    around = [node for node in _parsed(file) if node.lineno <= line <= (node.end_lineno or node.lineno)]
    functions = [node for node in around if not isinstance(node, Loop)]
    inner = max(functions, key=lambda node: node.lineno, default=None)
    loops = [node for node in around if isinstance(node, Loop) and (inner is None or node.lineno > inner.lineno)]
    return loops, [] if inner is None else [inner]


def batch_lines(frames: list[tuple[str, int]], model: Collection[tuple[str, int]] = ()) -> set[tuple[str, int]]:
    """Return the lines that make or ask for the next batch.

    These are the heads of the `for` loops around the step, and in the loops around it lines with `next(…)` and
    assignments that make what the step takes, as in `x, y = get_batch()`. In functions between the innermost loop and
    the step, the same assignments.

    Args:
        frames: the user's frames in which an optimizer stepped, the innermost first.
        model: the lines in which the model was called, as far as known.
    """
    lines: set[tuple[str, int]] = set()
    looped = False
    for file, line in reversed(frames):
        loops, function = _around(file, line)
        called = [number for path, number in model if path == file]
        for loop in loops:
            if not isinstance(loop, ast.While):
                # A line that contains some of the body does not count: samples of it are mostly the body's.
                lines.update((file, number) for number in range(loop.lineno, loop.body[0].lineno))
            names = (
                node.func for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            )
            lines.update((file, name.lineno) for name in names if name.id == "next")
        for node in loops or (function if looped else []):
            lines.update((file, number) for number in feeding_lines(node, line, called))
        looped = looped or bool(loops)
    return lines


Loop = ast.For | ast.AsyncFor | ast.While
StepBody = Loop | ast.FunctionDef | ast.AsyncFunctionDef
"""Code that runs once a step: the body of a loop, or a function that a loop calls."""
_Position = tuple[int, int]
_OTHER_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class _Use:
    """Names that are read at one position in the source."""

    names: frozenset[str]
    at: _Position


@dataclass(frozen=True)
class _Assignment:
    names: frozenset[str]
    use: _Use
    ends: _Position
    lines: range


def feeding_lines(loop: StepBody, step_line: int, model_lines: Collection[int] = ()) -> set[int]:
    """Return the lines of the assignments that make a step's inputs.

    Args:
        loop: the loop, or the function that a loop calls.
        step_line: line in its body in which the optimizer steps, or the function is called in which it does.
        model_lines: lines in which the model is called, as far as known.
    """
    nodes = list(_within(loop))
    assignments = [a for node in nodes if (a := _assignment(node)) is not None]
    calls = [node for node in nodes if isinstance(node, ast.Call) and any(_covers(node, n) for n in model_lines)]
    uses, losses = [_use(call) for call in calls], frozenset[str]()
    if not uses:
        backwards = [node for node in nodes if _is_backward(node)]
        stepping = [n for n in nodes if isinstance(n, ast.Expr | ast.Assign | ast.Return) and _covers(n, step_line)]
        uses = [_use(node) for node in (*backwards, *stepping)]
        losses = losses.union(*map(_losses, backwards))
    if not isinstance(loop, Loop):  # its caller may pass what it returns back to it
        uses += [_use(node.value) for node in nodes if isinstance(node, ast.Return) and node.value]
    results = {*model_lines, step_line}
    batches = [a for a in _reached(uses, assignments) if not a.names & losses and results.isdisjoint(a.lines)]
    return {line for a in batches for line in a.lines}


def _reached(uses: list[_Use], assignments: list[_Assignment]) -> set[_Assignment]:
    """Return the assignments that some uses depend on: those before them, or else those of the previous iteration."""
    open_uses, reached = list(uses), set[_Assignment]()
    while open_uses:
        use = open_uses.pop()
        for name in use.names:
            setting = [assignment for assignment in assignments if name in assignment.names]
            for assignment in [each for each in setting if each.ends <= use.at] or setting:
                if assignment not in reached:
                    reached.add(assignment)
                    open_uses.append(assignment.use)
    return reached


def _within(loop: StepBody) -> Iterator[ast.AST]:
    """Yield the nodes of a step's body, without those of functions that are defined in it."""
    pending: list[ast.AST] = list(loop.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _OTHER_SCOPES):
            pending += ast.iter_child_nodes(node)


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def _losses(backward: ast.AST) -> frozenset[str]:
    """Return the names of the loss in `loss.backward()`, `scaler.scale(loss).backward()`, `owner.backward(loss)`."""
    assert isinstance(backward, ast.Call) and isinstance(backward.func, ast.Attribute)
    owner = backward.func.value
    scaled = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "scale"
    operands = [*backward.args, *(owner.args if scaled and isinstance(owner, ast.Call) else [owner])]
    return frozenset(ast.unparse(operand) for operand in operands if isinstance(operand, ast.Name | ast.Attribute))


def _assignment(node: ast.AST) -> _Assignment | None:
    if isinstance(node, ast.Assign):
        targets, source = node.targets, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        targets, source = [node.target], node.value
    elif isinstance(node, ast.For | ast.AsyncFor):
        targets, source = [node.target], node.iter
    elif isinstance(node, ast.FunctionDef):  # its names are read where it is called, as a closure's are
        position = (node.lineno, node.col_offset)
        return _Assignment(frozenset([node.name]), _Use(_use(node).names, position), position, range(0))
    else:
        return None
    use = _use(source)
    names = frozenset().union(*(_targets(target) for target in targets))
    if isinstance(node, ast.AugAssign):
        use = replace(use, names=use.names | names)
    last = source.end_lineno or source.lineno
    return _Assignment(names, use, (last, source.end_col_offset or 0), range(node.lineno, last + 1))


def _targets(target: ast.AST) -> frozenset[str]:
    """Return what an assignment sets: names, attributes with their owner, the base of a subscript."""
    if isinstance(target, ast.Tuple | ast.List):
        return frozenset().union(*map(_targets, target.elts))
    if isinstance(target, ast.Starred | ast.Subscript):
        return _targets(target.value)
    return frozenset([ast.unparse(target)]) if isinstance(target, ast.Name | ast.Attribute) else frozenset()


def _use(node: ast.AST) -> _Use:
    source = node.value if isinstance(node, ast.Assign) else node
    names = (part for part in ast.walk(source) if isinstance(part, ast.Name | ast.Attribute))
    assert isinstance(source, ast.expr | ast.stmt)
    return _Use(frozenset(map(ast.unparse, names)), (source.lineno, source.col_offset))
