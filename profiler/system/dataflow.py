"""Which assignments in a loop's body make what the training step takes, by the names they set and read.

From the backward pass, and from the call in which the optimizer steps, names are followed back to where they are set:
before the use, or, where that is nowhere, later in the round before. Which of these calls is the model can't be told
from the source; a run tells the lines it is called in, and what follows from its result is no batch. Nor is what is
made of the batch that it was given (a teacher's targets), or of a module itself (a penalty on its weights).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

Loop = ast.For | ast.AsyncFor | ast.While
Round = Loop | ast.FunctionDef | ast.AsyncFunctionDef
"""What is run once a step: the body of a loop, or a function that a loop calls."""
_Place = tuple[int, int]
_OTHER_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_OF_MODULES = ("parameters", "named_parameters", "param_groups", "zero_grad", "train", "eval")
"""Attributes that tell a module or an optimizer."""
_READS_WEIGHTS = ("parameters", "named_parameters", "param_groups", "state_dict")
_ABOUT = ("device", "dtype", "config")
"""What batches are made to fit: reading these of a module is no use of it."""
_COUNTING = ("range", "trange", "count", "enumerate")


@dataclass(frozen=True)
class _Use:
    """Names that are read at a place."""

    names: frozenset[str]
    at: _Place
    plain: frozenset[str] = frozenset()
    """Those of them that are taken whole, as in `f(net)` or `net(x)`, not for one of their attributes."""
    weights: bool = False
    """Whether a module's weights are read."""


@dataclass(frozen=True)
class _Made:
    """An assignment."""

    names: frozenset[str]
    use: _Use
    ends: _Place
    lines: range

    def holds(self, lines: Collection[int]) -> bool:
        return any(line in self.lines for line in lines)


def feeding_lines(
    loop: Round, step_line: int, model_lines: Collection[int] = (), modules: Collection[str] = ()
) -> set[int]:
    """Return the lines of a round's assignments that make what a step takes.

    Args:
        loop: the loop, or the function that a loop calls.
        step_line: line in its body in which the optimizer steps, or the function is called in which it does.
        model_lines: lines in which the model is called, as far as they are known.
        modules: what is known to be a module or an optimizer, as it is written.
    """
    nodes = list(_within(loop))
    backwards = [node for node in nodes if _is_backward(node)]
    stepping = [n for n in nodes if isinstance(n, ast.Expr | ast.Assign | ast.Return) and _covers(n, step_line)]
    losses = frozenset().union(*(_losses(node) for node in backwards))
    made = [found for node in nodes if (found := _made(node)) is not None]
    open_uses = [_use(node) for node in (*backwards, *stepping)]
    if not isinstance(loop, Loop):  # what it returns, its caller may hand back to it
        open_uses += [_use(node.value) for node in nodes if isinstance(node, ast.Return) and node.value]
    reached = _reached(open_uses, made)
    first = {found for found in made if found.holds([*model_lines, step_line]) or _reads(found.use, modules)}
    results = _results(made, first | _of_the_batch_in_hand(loop, nodes, made, model_lines))
    batches = [found for found in reached if not found.names & losses and found not in results]
    return {line for found in batches for line in found.lines} - {step_line}


def _reached(uses: list[_Use], made: list[_Made]) -> set[_Made]:
    """Return the assignments that some uses go back to."""
    open_uses, reached = list(uses), set[_Made]()
    while open_uses:
        for found in _set_for(open_uses.pop(), made):
            if found not in reached:
                reached.add(found)
                open_uses.append(found.use)
    return reached


def _reads(use: _Use, modules: Collection[str]) -> bool:
    return use.weights or not use.plain.isdisjoint(modules)


def _of_the_batch_in_hand(
    loop: Round, nodes: list[ast.AST], made: list[_Made], model_lines: Collection[int]
) -> set[_Made]:
    """Return the assignments that are made of what the model is given, or has been given, in this round."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and any(_covers(node, n) for n in model_lines)]
    if not calls:
        return set()
    counters = _counters([loop, *nodes])
    given = frozenset().union(*map(_given, calls)) - counters
    together = [found.names for found in made]
    if isinstance(loop, ast.For | ast.AsyncFor):
        together.append(_targets(loop.target))
    beside = given.union(*(names for names in together if names & given)) - counters
    feeding = _reached([_use(call) for call in calls], made)
    called = min((call.lineno, call.col_offset) for call in calls)
    since = {found for found in made if found.ends > called}
    found_in_hand = set()
    for found in made:
        anew = {name for m in since if m.ends <= found.use.at for name in m.names}
        after = found.use.at > called
        read = found.use.names & (beside - anew if after else given)
        if read and (after or found not in feeding):
            found_in_hand.add(found)
    return found_in_hand


def _given(call: ast.Call) -> frozenset[str]:
    """Return what a call is given: its arguments, and what theirs are made of by methods and subscripts."""
    todo = [*call.args, *(keyword.value for keyword in call.keywords)]
    names = set()
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Starred | ast.BinOp | ast.Tuple | ast.List | ast.Dict):
            todo += [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            names.add(node.func.value.id)
    return frozenset(names)


def _counters(nodes: list[ast.AST]) -> frozenset[str]:
    """Return the names that only count rounds."""
    found: frozenset[str] = frozenset()
    for node in nodes:
        source = node.iter if isinstance(node, ast.For) else None
        if isinstance(source, ast.Call) and ast.unparse(source.func).split(".")[-1] in _COUNTING:
            assert isinstance(node, ast.For)
            pair = isinstance(node.target, ast.Tuple) and node.target.elts
            found |= _targets(pair[0] if pair else node.target)
    return found


def _results(made: list[_Made], first: set[_Made]) -> set[_Made]:
    """Return some assignments and those that follow from them in the same round."""
    results = set(first)
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


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
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
        use = replace(use, names=use.names | names)
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
    at = (source.lineno, source.col_offset)
    return _Use(frozenset(map(ast.unparse, names)), at, *_taken_whole(source))


def _taken_whole(source: ast.AST) -> tuple[frozenset[str], bool]:
    """Return what is read for more than one of its attributes, and whether a module's weights are among it."""
    todo, names, weights = [source], set(), False
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(ast.unparse(node))
        if isinstance(node, ast.Attribute):
            weights = weights or node.attr in _READS_WEIGHTS
            if node.attr in _ABOUT or isinstance(node.value, ast.Name | ast.Attribute):
                continue
        todo += ast.iter_child_nodes(node)
    return frozenset(names), weights


def known_modules(tree: ast.AST) -> frozenset[str]:
    """Return what must be a module or an optimizer, since a source asks it what only these have."""
    owners = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _OF_MODULES)
    return frozenset(ast.unparse(o) for o in owners if isinstance(o, ast.Name | ast.Attribute)) - {"self", "cls"}


def _set_for(use: _Use, made: list[_Made]) -> Iterator[_Made]:
    """Yield the assignments that may have set what a use reads."""
    for name in use.names:
        setting = [found for found in made if name in found.names]
        yield from [found for found in setting if found.ends <= use.at] or setting
