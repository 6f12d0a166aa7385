"""Recognise source that a kernel of accel replaces: attention within windows, SimOTA's assignment."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_WINDOW_ATTENTIONS = {"WindowAttention", "WindowMSA", "SwinAttention", "Swinv2SelfAttention", "ShiftedWindowAttention"}
"""Classes that `fuse_window_attention` replaces, recognised even if the softmax is in another function."""
_BIASES = {"relative_position_bias_table", "relative_position_bias", "relative_coords_table"}
"""The learned position bias of Swin attention: in version 1, in its ports, in version 2."""
_ENTROPIES = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}


def replaceable(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, habit) of the classes and functions that a kernel replaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and _attends_in_windows(node):
            yield node.lineno, "window-attention"
        if isinstance(node, ast.Module | ast.ClassDef):
            yield from ((function.lineno, "simota-loop") for function in _assigning(node))


def _attends_in_windows(node: ast.ClassDef) -> bool:
    """Match a module that multiplies queries with keys in windows, with a bias by position."""
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    forward = next((method for method in methods if method.name == "forward"), None)
    if forward is None or not any(word in node.name for word in ("Window", "Swin")):
        return False
    names = _names(node)
    if not names & _BIASES or "window_size" not in names:
        return False
    return node.name in _WINDOW_ATTENTIONS or any("softmax" in name for name in _names(forward))


def _assigning(scope: ast.Module | ast.ClassDef) -> list[ast.FunctionDef]:
    """Return the functions of SimOTA: the loop over boxes with a topk for each, and callers that compute its costs."""
    methods = [child for child in scope.body if isinstance(child, ast.FunctionDef)]
    loops = [method for method in methods if _takes_dynamic_k(method)]
    names = {method.name for method in loops}
    callers = [method for method in methods if method not in loops and _names(method) & names]
    weighing = [method for method in [*loops, *callers] if _names(method) & _ENTROPIES]
    # The same matching with soft labels, as in RTMDet, computes other costs.
    if not weighing or any("soft" in name for method in weighing for name in _names(method)):
        return []
    return [*loops, *(method for method in callers if method in weighing)]


def _takes_dynamic_k(method: ast.FunctionDef) -> bool:
    """Match `for g in …: torch.topk(cost[g], k=ks[g])`."""
    for loop in (part for part in ast.walk(method) if isinstance(part, ast.For)):
        turn = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
        for call in (part for part in ast.walk(loop) if isinstance(part, ast.Call)):
            ks = [keyword.value for keyword in call.keywords if keyword.arg == "k"] or call.args[1:2]
            if _called(call) == "topk" and ks and any(_is_entry(part, turn) for part in ast.walk(ks[0])):
                return True
    return False


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _is_entry(node: ast.AST, turn: set[str]) -> bool:
    """Match `ks[g]`, or a k that is itself the loop variable."""
    if isinstance(node, ast.Subscript):
        return any(isinstance(part, ast.Name) and part.id in turn for part in ast.walk(node.slice))
    return isinstance(node, ast.Name) and node.id in turn


def _names(node: ast.AST) -> set[str]:
    parts = (part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute))
    return {part.id if isinstance(part, ast.Name) else part.attr for part in parts}
