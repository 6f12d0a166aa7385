"""Which assignments in a loop's body make the inputs of the training step, by the names they set and read.

From the backward pass, and from the call in which the optimizer steps, names are followed back to where they are set:
before the use or, if they are set nowhere before it, later in the previous iteration. Which call is the model's can't
be inferred from the source: a run reports the lines it is called in, and what is computed from its result is no batch.
Neither is what is computed from the batch that the model got (a teacher's targets), or from a module itself (a penalty
on its weights).
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
_OF_MODULES = ("parameters", "named_parameters", "param_groups", "zero_grad", "train", "eval")
"""Attributes that show that their owner is a module or an optimizer."""
_READS_WEIGHTS = ("parameters", "named_parameters", "param_groups", "state_dict")
_FITTED_TO = ("device", "dtype", "config")
"""Attributes that batches are made to fit: reading them from a module does not count as using it."""
_COUNTING = ("range", "trange", "count", "enumerate")


@dataclass(frozen=True)
class _Use:
    """Names that are read at one position in the source."""

    names: frozenset[str]
    at: _Position
    plain: frozenset[str] = frozenset()
    """The names that are read as a whole, as in `f(net)` or `net(x)`, not for one of their attributes."""
    weights: bool = False
    """Whether a module's weights are read."""


@dataclass(frozen=True)
class _Assignment:
    """An assignment."""

    names: frozenset[str]
    use: _Use
    ends: _Position
    lines: range

    def holds(self, lines: Collection[int]) -> bool:
        return any(line in self.lines for line in lines)


def feeding_lines(
    loop: StepBody, step_line: int, model_lines: Collection[int] = (), modules: Collection[str] = ()
) -> set[int]:
    """Return the lines of the assignments that make a step's inputs.

    Args:
        loop: the loop, or the function that a loop calls.
        step_line: line in its body in which the optimizer steps, or the function is called in which it does.
        model_lines: lines in which the model is called, as far as known.
        modules: names, as written in the source, that are known to be modules or optimizers.
    """
    nodes = list(_within(loop))
    backwards = [node for node in nodes if _is_backward(node)]
    stepping = [n for n in nodes if isinstance(n, ast.Expr | ast.Assign | ast.Return) and _covers(n, step_line)]
    losses = frozenset().union(*(_losses(node) for node in backwards))
    assignments = [a for node in nodes if (a := _assignment(node)) is not None]
    open_uses = [_use(node) for node in (*backwards, *stepping)]
    if not isinstance(loop, Loop):  # its caller may pass what it returns back to it
        open_uses += [_use(node.value) for node in nodes if isinstance(node, ast.Return) and node.value]
    reached = _reached(open_uses, assignments)
    first = {a for a in assignments if a.holds([*model_lines, step_line]) or _reads(a.use, modules)}
    results = _results(assignments, first | _derived_from_current_batch(loop, nodes, assignments, model_lines))
    batches = [a for a in reached if not a.names & losses and a not in results]
    return {line for a in batches for line in a.lines} - {step_line}


def _reached(uses: list[_Use], assignments: list[_Assignment]) -> set[_Assignment]:
    """Return the assignments that some uses depend on."""
    open_uses, reached = list(uses), set[_Assignment]()
    while open_uses:
        for assignment in _reaching(open_uses.pop(), assignments):
            if assignment not in reached:
                reached.add(assignment)
                open_uses.append(assignment.use)
    return reached


def _reads(use: _Use, modules: Collection[str]) -> bool:
    return use.weights or not use.plain.isdisjoint(modules)


def _derived_from_current_batch(
    loop: StepBody, nodes: list[ast.AST], assignments: list[_Assignment], model_lines: Collection[int]
) -> set[_Assignment]:
    """Return the assignments computed from what the model gets, or has got, in this iteration."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and any(_covers(node, n) for n in model_lines)]
    if not calls:
        return set()
    counters = _counters([loop, *nodes])
    arguments = frozenset().union(*map(_arguments, calls)) - counters
    set_together = [assignment.names for assignment in assignments]
    if isinstance(loop, ast.For | ast.AsyncFor):
        set_together.append(_targets(loop.target))
    current = arguments.union(*(names for names in set_together if names & arguments)) - counters
    feeding = _reached([_use(call) for call in calls], assignments)
    called = min((call.lineno, call.col_offset) for call in calls)
    later = {assignment for assignment in assignments if assignment.ends > called}
    derived = set()
    for assignment in assignments:
        overwritten = {name for m in later if m.ends <= assignment.use.at for name in m.names}
        after = assignment.use.at > called
        read = assignment.use.names & (current - overwritten if after else arguments)
        if read and (after or assignment not in feeding):
            derived.add(assignment)
    return derived


def _arguments(call: ast.Call) -> frozenset[str]:
    """Return the names in a call's arguments, and the objects whose methods are called in them."""
    pending = [*call.args, *(keyword.value for keyword in call.keywords)]
    names = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Starred | ast.BinOp | ast.Tuple | ast.List | ast.Dict):
            pending += [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            names.add(node.func.value.id)
    return frozenset(names)


def _counters(nodes: list[ast.AST]) -> frozenset[str]:
    """Return the names that only count iterations."""
    names: frozenset[str] = frozenset()
    for node in nodes:
        source = node.iter if isinstance(node, ast.For) else None
        if isinstance(source, ast.Call) and ast.unparse(source.func).split(".")[-1] in _COUNTING:
            assert isinstance(node, ast.For)
            pair = isinstance(node.target, ast.Tuple) and node.target.elts
            names |= _targets(pair[0] if pair else node.target)
    return names


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
    at = (source.lineno, source.col_offset)
    return _Use(frozenset(map(ast.unparse, names)), at, *_whole_names(source))


def _whole_names(source: ast.AST) -> tuple[frozenset[str], bool]:
    """Return the names that are read as a whole, and whether a module's weights are read."""
    pending, names, weights = [source], set(), False
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(ast.unparse(node))
        if isinstance(node, ast.Attribute):
            weights = weights or node.attr in _READS_WEIGHTS
            if node.attr in _FITTED_TO or isinstance(node.value, ast.Name | ast.Attribute):
                continue
        pending += ast.iter_child_nodes(node)
    return frozenset(names), weights


def known_modules(tree: ast.AST) -> frozenset[str]:
    """Return the names that must be modules or optimizers, since the source reads attributes that only these have."""
    owners = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _OF_MODULES)
    return frozenset(ast.unparse(o) for o in owners if isinstance(o, ast.Name | ast.Attribute)) - {"self", "cls"}


def _reaching(use: _Use, assignments: list[_Assignment]) -> Iterator[_Assignment]:
    """Yield the assignments that may have set what a use reads."""
    for name in use.names:
        setting = [assignment for assignment in assignments if name in assignment.names]
        yield from [assignment for assignment in setting if assignment.ends <= use.at] or setting
