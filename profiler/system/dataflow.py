"""Which assignments in a loop's body make the inputs of the training step, by the names they set and read.

Names are followed back from the model's call to where they are set: before the call or, if they are set nowhere before
it, later in the previous iteration. Which call is the model's can't be inferred from the source: a run reports the
lines it is called in. Where it reports none, names are followed from the backward pass and from the optimizer's step.
What is computed from the model's result is no batch.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

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
    """An assignment."""

    names: frozenset[str]
    use: _Use
    ends: _Position
    lines: range

    def holds(self, lines: Collection[int]) -> bool:
        return any(line in self.lines for line in lines)


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
    results = _results(assignments, {a for a in assignments if a.holds([*model_lines, step_line])})
    batches = [a for a in _reached(uses, assignments) if not a.names & losses and a not in results]
    return {line for a in batches for line in a.lines} - {step_line}


def _reached(uses: list[_Use], assignments: list[_Assignment]) -> set[_Assignment]:
    """Return the assignments that some uses depend on."""
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


def _results(assignments: list[_Assignment], first: set[_Assignment]) -> set[_Assignment]:
    """Return some assignments and those computed from them in the same iteration."""
    results = set(first)
    before = 0
    while len(results) > before:
        before = len(results)
        results |= {
            assignment
            for assignment in assignments
            if any(r.names & assignment.use.names and r.ends <= assignment.use.at for r in results)
            and not _overwritten(assignment, results, assignments)
        }
    return results


def _overwritten(assignment: _Assignment, results: set[_Assignment], assignments: list[_Assignment]) -> bool:
    """Return whether every result that an assignment reads has been set to something else in between."""
    for name in assignment.use.names:
        setting = [m for m in assignments if name in m.names and m.ends <= assignment.use.at]
        if setting and max(setting, key=lambda m: m.ends) in results:
            return False
    return True


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
