"""The line of the user's script that each traced operator or runtime call comes from.

Kineto's tree holds Python's calls with the line each was made from. A call of a method (`loss.item()`) is among them;
what goes through a type's slot (`float(loss)`, `if loss > 0`) is not, and gets the last recorded line of its
function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from typing import Any

from accel.profiler.system.loop_source import is_users

Location = tuple[str, int]

NOWHERE: Location = ("", 0)


def users_lines(
    roots: Iterable[Any],
    operators: Container[int],
    calls: Container[int] = (),
    is_file: Callable[[str], bool] = is_users,
) -> dict[tuple[bool, int], Location]:
    """Return the locations of some events in the user's files.

    Args:
        roots: kineto's `experimental_event_tree()`, recorded with stacks.
        operators: correlation ids of the operators to find.
        calls: correlation ids of the runtime calls to find; they are counted apart from the operators'.
        is_file: returns whether a file is the user's.

    Returns:
        (is it an operator, its correlation id) → (file, line); events without a location are left out.
    """
    locations: dict[tuple[bool, int], Location] = {}
    # Not by recursion: a deep model's calls are nested deeper than Python's limit.
    pending = [(root, NOWHERE) for root in roots]
    while pending:
        node, location = pending.pop()
        tag = node.tag.name
        if location is not NOWHERE and tag in ("TorchOp", "Kineto"):
            number = node.correlation_id
            if number in (operators if tag == "TorchOp" else calls):
                locations[tag == "TorchOp", number] = location
        here = _own_location(node, tag, is_file) or location
        for child in node.children:
            here = _call_location(child, is_file) or here
            pending.append((child, here))
    return locations


def _call_location(node: Any, is_file: Callable[[str], bool]) -> Location | None:
    """Return the line that made a Python call, if the node is one and the line is the user's."""
    if node.tag.name not in ("PyCall", "PyCCall"):
        return None
    caller = node.extra_fields.caller
    file = full_path(caller.file_name)
    return (file, caller.line_number) if is_file(file) else None


def _own_location(node: Any, tag: str, is_file: Callable[[str], bool]) -> Location | None:
    """Return where a user's function begins, if the node is a call of one."""
    if tag != "PyCall":
        return None
    callee = node.extra_fields.callsite
    file = full_path(callee.file_name)
    return (file, callee.line_number) if is_file(file) else None


@lru_cache(maxsize=4096)
def full_path(file: str) -> str:
    """Return the path of a file whose beginning kineto cut off because it is on `sys.path`."""
    if os.path.isabs(file) or file.startswith("<"):
        return file
    paths = (os.path.join(folder or os.getcwd(), file) for folder in sys.path)
    return next((path for path in paths if os.path.isfile(path)), file)
