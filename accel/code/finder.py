"""Slow habits in Python source: code that a kernel replaces, indices from the host, waits in loops. Nothing is run.

Files are parsed, not imported. A habit is reported only if the text alone shows it (an index that is certainly made on
the host, a name that contains "mask") and only in code that a training step runs, see `steps`. So findings may be
missed, and are seldom false.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accel.code.kernels import replaceable
from accel.code.steps import Function, functions, in_steps

SKIPPED = {"site-packages", "node_modules", "__pycache__", "venv"}
"""Folders without code of the user's own; those whose name begins with a dot are skipped too."""


@dataclass(frozen=True)
class Habit:
    """A slow way to write something."""

    costs: str
    instead: str


HABITS = {
    "window-attention": Habit(
        "windows are cut out, and bias, mask, softmax and dropout are passes over all pairs of tokens, which are kept "
        "for the backward pass",
        "model = accel.kernels.window_dropins.fuse_window_attention(model) for the known classes on a GPU; "
        "accel.kernels.window_attention.window_attention(qkv, table, ...) in a class of your own",
    ),
    "simota-loop": Habit(
        "boxes are assigned image by image and box by box, and each topk with its own k waits for the device: 563 ms "
        "for 16 images of 50 boxes, against 17.7 ms for the batch at once (measured on a CPU)",
        "accel.kernels.simota_heads.patch_yolox_head(head) for YOLOX, BatchedSimOTAAssigner for MMDetection, "
        "accel.kernels.simota.simota_assign(...) elsewhere",
    ),
    "host-index": Habit(
        "Python makes a list of the integers and torch a tensor of the list: 6.3 ms of host time at 30,929 rows, "
        "against 0.1 ms with a tensor index (measured on a CPU)",
        "accel.kernels.gather_rows.gather_rows(t, index), or at least t[torch.arange(n, device=t.device), index]",
    ),
    "item-in-loop": Habit(
        "each turn of the loop waits until the device has done all its work, and the device then waits for the host",
        "keep it a tensor, e.g. torch.where instead of if; or collect tensors and call .tolist() once after the loop",
    ),
    "sync-in-loop": Habit(
        "the number must come from the device: each turn of the loop waits for all its work",
        "mask.sum() stays on the device; accel.kernels.compact.compact(t, mask, size) has a fixed shape",
    ),
    "mask-index": Habit(
        "the shape of t[mask] is known only to the device: the host waits for it at every call",
        "accel.kernels.compact.compact(t, mask, size), or weigh by the mask: (loss * mask).sum() / mask.sum()",
    ),
    "empty-cache-in-loop": Habit(
        "the device is waited for and its memory given back, so that every turn asks the driver for it anew",
        "leave it out; against fragments set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
}


@dataclass(frozen=True)
class CodeFinding:
    """A place with a slow habit.

    Attributes:
        habit: one of `HABITS`.
        file, line: where.
        source: that line, without its indentation.
        costs: what it costs.
        instead: what to write.
    """

    habit: str
    file: str
    line: int
    source: str
    costs: str
    instead: str


@dataclass(frozen=True)
class Search:
    """The findings, and the files that could not be read.

    Attributes:
        findings: in the order of files and lines.
        unread: (file, reason).
        files: how many were parsed, those without torch included.
    """

    findings: list[CodeFinding]
    unread: list[tuple[str, str]]
    files: int


def search(path: Path) -> Search:
    """Search a file, or a folder and all below it.

    Args:
        path: a file of any name, or a folder, of which the `.py` files are searched; other people's code in it
            (`SKIPPED`, hidden folders) and links to folders are left out.

    Returns:
        Findings, and the files that are no readable Python.
    """
    read: list[_File] = []
    unread: list[tuple[str, str]] = []
    files = list(_sources(path)) if path.is_dir() else [path]
    for file in files:
        try:
            read.append(_read(file.read_bytes(), str(file)))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            unread.append((str(file), _reason(error)))
    return Search(_in_steps(read), unread, len(files) - len(unread))


def _sources(folder: Path) -> Iterator[Path]:
    for parent, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if name not in SKIPPED and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error) or type(error).__name__


def find(source: bytes | str, file: str) -> list[CodeFinding]:
    """Return the slow habits in the text of one file.

    Args:
        source: the file's contents.
        file: its name, for the findings.

    Raises:
        SyntaxError: if it is no Python.
    """
    return _in_steps([_read(source, file)])


@dataclass(frozen=True)
class _File:
    """The functions and findings of one file.

    Attributes:
        functions: its functions, with its own text.
        seen: findings, each with the function it is in; None for a whole class or function that a kernel replaces.
    """

    functions: list[Function]
    findings: list[tuple[CodeFinding, Function | None]]


def _read(source: bytes | str, file: str) -> _File:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the user's strings
        tree = ast.parse(source)
    defined = list(functions(tree, file).values())
    if not _uses_torch(tree):
        return _File(defined, [])
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else source
    lines = re.split(r"\r\n|\r|\n", text)  # as ast counts them; a form feed or U+2028 ends no line there
    within = {node: function for function in defined for node in function.nodes}
    walked = _walk(tree, _numpy_names(tree), looping=False, losing="loss" in Path(file).stem)
    placed = {(node.lineno, habit): within.get(id(node)) for node, habit in walked}
    # Code outside of every function's part of a step is not run in a step.
    in_functions = {place: function for place, function in placed.items() if function is not None}
    replaced: dict[tuple[int, str], Function | None] = dict.fromkeys(replaceable(tree))
    findings = [
        (CodeFinding(habit, file, line, _line(lines, line), **vars(HABITS[habit])), function)
        for (line, habit), function in sorted({**in_functions, **replaced}.items(), key=lambda item: item[0])
    ]
    return _File(defined, findings)


def _line(lines: list[str], number: int) -> str:
    return lines[number - 1].strip() if number <= len(lines) else ""


def _in_steps(files: list[_File]) -> list[CodeFinding]:
    """Return the findings in code that a training step runs."""
    reached = in_steps([function for file in files for function in file.functions])

    def runs(function: Function | None) -> bool:
        return function is None or (not function.kept_out and (function.begins or function.name in reached))

    return [finding for file in files for finding, function in file.findings if runs(function)]


def _uses_torch(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "torch" for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch" and not node.level:
            return True
    return False


def _numpy_names(tree: ast.AST) -> set[str]:
    """Return the names that are assigned a numpy array somewhere, for which an index on the host is right."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_numpy(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _is_numpy(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    converted = _dotted(node.func).partition(".")[0] in {"np", "numpy"}
    return converted or (isinstance(node.func, ast.Attribute) and node.func.attr == "numpy")


def _walk(node: ast.AST, arrays: set[str], *, looping: bool, losing: bool) -> Iterator[tuple[ast.expr, str]]:
    """Yield (expression, habit) below `node`.

    Args:
        node: where to look.
        arrays: names of numpy arrays.
        looping: whether it is run once a turn of a loop.
        losing: whether it is part of a loss.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        # A function defined in a loop is not run there.
        looping, losing = False, losing or "loss" in node.name.lower()
    elif isinstance(node, ast.Return | ast.Raise):
        looping = False  # the loop ends here
    habit = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        habit = _index_habit(node, arrays, losing)
    elif isinstance(node, ast.Call) and looping:
        habit = _call_habit(node)
    if habit is not None and isinstance(node, ast.expr):
        yield node, habit
    repeated = _repeated(node)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, arrays, looping=looping or child in repeated, losing=losing)


def _repeated(node: ast.AST) -> list[ast.AST]:
    """Return the children that a loop runs in each iteration; its iterable is evaluated once."""
    if isinstance(node, ast.For | ast.AsyncFor):
        return list(node.body)
    if isinstance(node, ast.While):
        return [node.test, *node.body]
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return [] if any(_on_host(generator.iter) for generator in node.generators) else [node.elt]
    if isinstance(node, ast.DictComp):
        return [node.key, node.value]
    return []


def _on_host(node: ast.expr) -> bool:
    """Match a tensor that is explicitly made on the CPU: torch.linspace(0, 1, 9, device="cpu")."""
    devices = (
        [keyword.value for keyword in node.keywords if keyword.arg == "device"] if isinstance(node, ast.Call) else []
    )
    return any(isinstance(device, ast.Constant) and device.value == "cpu" for device in devices)


def _index_habit(node: ast.Subscript, arrays: set[str], losing: bool) -> str | None:
    if not isinstance(node.value, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return None  # a literal: an ordinary list or dict
    index = node.slice
    if isinstance(index, ast.Tuple):
        others = [part for part in index.elts if not _is_host_sequence(part)]
        if any(_is_numpy(part) or _dotted(part) in arrays for part in (node.value, *others)):
            return None
        if isinstance(node.value, ast.Attribute) and node.value.attr in {"loc", "iloc"}:
            return None  # a data frame
        paired = any(not isinstance(part, ast.Slice | ast.Constant) for part in others)
        return "host-index" if paired and len(others) < len(index.elts) else None
    return "mask-index" if losing and _is_mask(index) else None


def _is_host_sequence(node: ast.expr) -> bool:
    """Match range(…), list(range(…)), np.arange(…) and [i for i in …]."""
    if isinstance(node, ast.ListComp):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = _dotted(node.func)
    if name in {"list", "tuple"}:
        return len(node.args) == 1 and _is_host_sequence(node.args[0])
    return name in {"range", "np.arange", "numpy.arange"}


def _is_mask(node: ast.expr) -> bool:
    """Match a mask: a comparison, several of them, or a name with that word."""
    if isinstance(node, ast.Compare):
        return all(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq | ast.NotEq) for op in node.ops)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        return _is_mask(node.left) or _is_mask(node.right)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert) and _is_mask(node.operand)
    words = _dotted(node).rpartition(".")[2].lower().split("_")
    # An index into masks, such as mask_id, is not a mask.
    return not {"mask", "masks"}.isdisjoint(words) and words[-1] not in {"id", "ids", "idx", "inds", "index", "num"}


def _call_habit(node: ast.Call) -> str | None:
    called = node.func
    if _dotted(called) == "torch.cuda.empty_cache":
        return "empty-cache-in-loop"
    if isinstance(called, ast.Attribute) and called.attr == "item" and not node.args and not node.keywords:
        return None if _is_host_random(called.value) else "item-in-loop"
    if isinstance(called, ast.Name) and called.id in {"int", "float", "bool", "len"} and len(node.args) == 1:
        return "sync-in-loop" if _on_device(node.args[0], counted=called.id == "len") else None
    return None


_REDUCTIONS = {"sum", "max", "min", "mean", "any", "all", "amax", "amin", "argmax", "argmin", "count_nonzero"}
_HOST = {"np", "numpy", "math", "statistics", "random", "builtins"}


def _is_host_random(node: ast.expr) -> bool:
    """Match a random number that torch draws on the CPU: torch.randint(9, (1,)) without a device."""
    drawn = isinstance(node, ast.Call) and _dotted(node.func).startswith(("torch.rand", "torch.multinomial"))
    return drawn and isinstance(node, ast.Call) and not any(keyword.arg == "device" for keyword in node.keywords)


def _on_device(node: ast.expr, *, counted: bool) -> bool:
    """Match what certainly comes from a device: a method that tensors have, and lists and numbers don't."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if _dotted(node.func.value).partition(".")[0] in _HOST:
        return False
    return node.func.attr in ({"nonzero", "unique"} if counted else _REDUCTIONS)


def _dotted(node: ast.expr) -> str:
    """Return a.b.c as text; '' for anything but a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else node.attr
    return ""
