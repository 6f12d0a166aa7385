"""Which functions run in a training step, as far as the source shows; nothing is run.

A function belongs to a step if it trains itself (a backward pass, an update), is a `forward` or makes a loss, or is
named in one that belongs. Constructors, loggers and evaluation don't, wherever they are named. In a loop that trains,
code that runs only every so many steps (`if step % 100 == 0`) doesn't belong either, nor do exception handlers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MODULE = "<module>"

_CONSTRUCTORS = {"__init__", "__new__", "__post_init__", "__repr__", "extra_repr", "reset_parameters"}


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EVALUATION = _set(
    "eval evaluate evaluates evaluation evaluator evaluators val validate validation test tests testing infer "
    "inference predict predictor prediction demo export visualize visualizer visualization vis plot draw generate"
)
_RECORDS = _set(
    "log logs logger loggers logging mlflow wandb tensorboard print summary summarize save load checkpoint checkpoints "
    "convert init setup metric metrics"
)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Function:
    """A function, or the module-level code outside of all functions.

    Attributes:
        name: its last name.
        begins: whether a step surely runs it.
        kept_out: whether no step does: a constructor, a logger, an evaluation.
        names: the names that its part of a step holds.
        nodes: the nodes that belong to a step if the function does.
    """

    name: str
    begins: bool
    kept_out: bool
    names: frozenset[str]
    nodes: frozenset[int] = field(compare=False)


def functions(tree: ast.Module, file: str) -> dict[ast.AST, Function]:
    """Return the functions of a file by their node, including the module-level code."""
    stem = _words(Path(file).stem)
    by_node: dict[ast.AST, Function] = {tree: _function(tree, MODULE, [stem])}
    for node, classes in _defined(tree, []):
        by_node[node] = _function(node, node.name, [stem, *map(_words, classes)])
    return by_node


def in_steps(defined: list[Function]) -> set[str]:
    """Return the names of the functions that steps run.

    Where no function begins a step (a file of helpers alone), all that are not kept out may be run.
    """
    inside = [function for function in defined if not function.kept_out]
    if not any(function.begins for function in inside):
        return {function.name for function in inside}
    by_name: dict[str, list[Function]] = {}
    for function in inside:
        by_name.setdefault(function.name, []).append(function)
    reached: set[str] = set()
    todo = [function for function in inside if function.begins]
    while todo:
        function = todo.pop()
        for name in function.names & by_name.keys():
            if name not in reached:
                reached.add(name)
                todo += by_name[name]
    return reached


def _defined(node: ast.AST, classes: list[str]) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, list[str]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, classes
        yield from _defined(child, [*classes, child.name] if isinstance(child, ast.ClassDef) else classes)


def _function(node: ast.AST, name: str, places: list[set[str]]) -> Function:
    own = list(_own(node))
    trains = any(map(_trains, own))
    nodes = list(_step_nodes(node, own)) if trains else own
    words = _words(name)
    loses = "loss" in words or "losses" in words
    evaluates = any(_is_call(part, "eval") for part in own)
    elsewhere = any(place & (_EVALUATION | _RECORDS) for place in places) or bool(words & _EVALUATION) or evaluates
    kept_out = name in _CONSTRUCTORS or (not trains and (elsewhere or (bool(words & _RECORDS) and not loses)))
    begins = trains or loses or name == "forward" or "train" in words or "training" in words
    parts = [part for part in nodes if isinstance(part, ast.Name | ast.Attribute)]
    names = frozenset(part.id if isinstance(part, ast.Name) else part.attr for part in parts)
    return Function(name, (begins and name != MODULE) or trains, kept_out, names, frozenset(map(id, nodes)))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below this one, except those of nested functions and classes and of code that runs rarely."""
    rare = isinstance(node, ast.If) and _is_rare(node)
    for child in node.orelse if isinstance(node, ast.If) and rare else ast.iter_child_nodes(node):
        if not isinstance(child, ast.ExceptHandler):
            yield child
            yield from _own(child) if not isinstance(child, _SCOPES) else ()


def _is_rare(node: ast.If) -> bool:
    """Match `if step % 100 == 0: …`, unless its body updates: then it accumulates gradients and is the step."""
    counts = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) for part in ast.walk(node.test))
    return counts and not any(_trains(part) for child in node.body for part in ast.walk(child))


def _step_nodes(node: ast.AST, own: list[ast.AST]) -> Iterator[ast.AST]:
    """Yield what a function that trains does in each step: its loops that train, or everything if it has none."""
    loops = [part for part in own if isinstance(part, _LOOPS) and any(map(_trains, _own(part)))]
    if not loops:
        yield from own
    for loop in loops:
        yield loop
        yield from _own(loop)


def _trains(node: ast.AST) -> bool:
    """Match the call of a backward pass or of an update."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in {"backward", "zero_grad"}:
        return True
    owner = node.func.value
    of = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return node.func.attr == "step" and ("optim" in of.lower() or of.lower() in {"opt", "scaler"})


def _is_call(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _words(name: str) -> set[str]:
    """Return the words of a name in either style: `COCOEvaluator`, `coco_evaluator`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}
