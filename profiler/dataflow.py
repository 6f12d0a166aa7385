"""Which assignments in a loop's body make what the training step takes, by the names they set and read.

From the backward pass, and from the call in which the optimizer steps, names are followed back to where they are set:
before the use, or, where that is nowhere, later in the round before. Which of these calls is the model can't be told
from the source; a run tells the lines it is called in, and what follows from its result is no batch.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

Loop = ast.For | ast.AsyncFor | ast.While
Round = Loop | ast.FunctionDef | ast.AsyncFunctionDef
"""What is run once a step: the body of a loop, or a function that a loop calls."""
_Place = tuple[int, int]
_OTHER_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class _Use:
    """Names that are read at a place."""

    names: frozenset[str]
    at: _Place


@dataclass(frozen=True)
class _Made:
    """An assignment."""

    names: frozenset[str]
    use: _Use
    ends: _Place
    lines: range

    def holds(self, lines: Collection[int]) -> bool:
        return any(line in self.lines for line in lines)


def feeding_lines(loop: Round, step_line: int, model_lines: Collection[int] = ()) -> set[int]:
    """Return the lines of a round's assignments that make what a step takes.

    Args:
        loop: the loop, or the function that a loop calls.
        step_line: line in its body in which the optimizer steps, or the function is called in which it does.
        model_lines: lines in which the model is called, as far as they are known.
    """
    nodes = list(_within(loop))
    backwards = [node for node in nodes if _is_backward(node)]
    stepping = [n for n in nodes if isinstance(n, ast.Expr | ast.Assign | ast.Return) and _covers(n, step_line)]
    losses = frozenset().union(*(_losses(node) for node in backwards))
    made = [found for node in nodes if (found := _made(node)) is not None]
    open_uses = [_use(node) for node in (*backwards, *stepping)]
    if not isinstance(loop, Loop):  # what it returns, its caller may hand back to it
        open_uses += [_use(node.value) for node in nodes if isinstance(node, ast.Return) and node.value]
    reached: set[_Made] = set()
    while open_uses:
        for found in _set_for(open_uses.pop(), made):
            if found not in reached:
                reached.add(found)
                open_uses.append(found.use)
    results = _results(made, [*model_lines, step_line])
    batches = [found for found in reached if not found.names & losses and found not in results]
    return {line for found in batches for line in found.lines} - {step_line}


def _results(made: list[_Made], lines: list[int]) -> set[_Made]:
    """Return the assignments in some lines, and those that follow from them in the same round."""
    results = {found for found in made if found.holds(lines)}
    before = 0
    while len(results) > before:
        before = len(results)
        results |= {
            found
            for found in made
            if any(r.names & found.use.names and r.ends <= found.use.at for r in results)
            and not _made_anew(found, results, made)
        }
    return results


def _made_anew(found: _Made, results: set[_Made], made: list[_Made]) -> bool:
    """Tell whether all that an assignment reads of some results has been set to something else in between."""
    for name in found.use.names:
        setting = [m for m in made if name in m.names and m.ends <= found.use.at]
        if setting and max(setting, key=lambda m: m.ends) in results:
            return False
    return True


def _within(loop: Round) -> Iterator[ast.AST]:
    """Yield the nodes of a round's body, without those of functions that are defined in it."""
    todo: list[ast.AST] = list(loop.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, _OTHER_SCOPES):
            todo += ast.iter_child_nodes(node)


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def _losses(backward: ast.AST) -> frozenset[str]:
    """Return the names of the loss in `loss.backward()`, `scaler.scale(loss).backward()`, `owner.backward(loss)`."""
    assert isinstance(backward, ast.Call) and isinstance(backward.func, ast.Attribute)
    owner = backward.func.value
    scaled = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "scale"
    places = [*backward.args, *(owner.args if scaled and isinstance(owner, ast.Call) else [owner])]
    return frozenset(ast.unparse(place) for place in places if isinstance(place, ast.Name | ast.Attribute))


def _made(node: ast.AST) -> _Made | None:
    if isinstance(node, ast.Assign):
        targets, source = node.targets, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        targets, source = [node.target], node.value
    elif isinstance(node, ast.For | ast.AsyncFor):
        targets, source = [node.target], node.iter
    elif isinstance(node, ast.FunctionDef):  # what it reads is read where it is called, as a closure is
        place = (node.lineno, node.col_offset)
        return _Made(frozenset([node.name]), _Use(_use(node).names, place), place, range(0))
    else:
        return None
    use = _use(source)
    names = frozenset().union(*(_targets(target) for target in targets))
    if isinstance(node, ast.AugAssign):
        use = _Use(use.names | names, use.at)
    last = source.end_lineno or source.lineno
    return _Made(names, use, (last, source.end_col_offset or 0), range(node.lineno, last + 1))


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


def _set_for(use: _Use, made: list[_Made]) -> Iterator[_Made]:
    """Yield the assignments that may have set what a use reads."""
    for name in use.names:
        setting = [found for found in made if name in found.names]
        yield from [found for found in setting if found.ends <= use.at] or setting
