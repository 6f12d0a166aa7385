"""A plan as a change of the script: what one would write by hand, as a unified diff.

    source ─▶ where the optimizer, the loader and the model's call are ─▶ an edit for each strategy ─▶ diff

Places are found in the syntax tree, by the names that the script uses; settings of the process follow the imports. What
is not found, or found twice, is not guessed: the strategy is named with the reason. `patch -p1 -R` takes the change
back.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accel.errors import AccelError
from accel.files import save
from accel.optimized import MODELS
from accel.profiler.loop.optimizers import Optimizers
from accel.run.context import Run
from accel.strategies.torch_compile import WHOLE


class NotWritable(AccelError):
    """A strategy can't be written into this script; the message says why."""


class Edit(NamedTuple):
    """Text that replaces the source from `start` to `end`, in characters."""

    start: int
    end: int
    text: str


class ModelPlan(NamedTuple):
    """What was kept for a model.

    Args:
        choices: strategy → setting, as in a plan.
        model: class of the model, e.g. "ResNet"; needed where a script makes several optimizers of one class.
        optimizer: class of its optimizer, e.g. "AdamW".
        device: type of its device, "cpu" or "cuda".
        returns_tensor: whether a call returns one tensor, and nothing else.
        has_workers: whether its loader has workers of its own.
    """

    choices: Mapping[str, Any]
    model: str
    optimizer: str
    device: str
    returns_tensor: bool = True
    has_workers: bool = False


@dataclass
class ScriptPatch:
    """The change of a script that writes a plan into it.

    Attributes:
        diff: unified, empty if nothing could be written.
        written: names of the strategies in it.
        left: strategies that are not in it, each with the reason.
    """

    diff: str = ""
    written: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def patch_script(source: str, name: str, plans: Sequence[ModelPlan]) -> ScriptPatch:
    """Write plans into a script.

    Args:
        source: text of the script.
        name: its path, for the header of the diff.
        plans: of each model that the script trains.

    Returns:
        The diff, with what is in it and what is not.

    Example:
        >>> script = "opt = torch.optim.SGD(net.parameters(), lr=0.1)\\n"
        >>> plan = ModelPlan({"fused_optimizer": "fused"}, "Net", "SGD", "cpu")
        >>> print(patch_script(script, "train.py", [plan]).diff)
        --- a/train.py
        +++ b/train.py
        @@ -1 +1 @@
        -opt = torch.optim.SGD(net.parameters(), lr=0.1)
        +opt = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
        <BLANKLINE>
    """
    result = ScriptPatch()
    edits: list[Edit] = []
    if why := _unusual(source):
        return ScriptPatch(left={_label(strategy, plan, plans): why for plan in plans for strategy in plan.choices})
    for plan in plans:
        script = _Source(source, plan, is_alone=len(plans) == 1)
        for strategy, setting in plan.choices.items():
            label = _label(strategy, plan, plans)
            write = _WRITERS.get(strategy)
            try:
                if write is None:
                    raise NotWritable(f"no line of a script does the same; keep it by plan= ({strategy})")
                added = [*write(script, setting)]
                own = edits if set(added) <= set(edits) else [*edits, *added]  # one model may have what another has
                ast.parse(_applied(source, own))
            except NotWritable as reason:
                result.left[label] = str(reason)
                continue
            except SyntaxError:
                result.left[label] = "the place in the script is written in an unusual way"
                continue
            edits = own
            result.written.append(label)
    changed = _applied(source, edits)
    lines, new = (text.splitlines(keepends=True) for text in (source, changed))
    tab = "\t" if " " in name else ""  # by which patch knows where such a name ends
    result.diff = "".join(difflib.unified_diff(lines, new, f"a/{name}{tab}", f"b/{name}{tab}"))
    return result


def _unusual(source: str) -> str:
    """Say why no diff of a text would apply, '' if one would."""
    if not source.endswith("\n") or any(each in source for each in "\r\f\ufeff"):
        return "the file has Windows line ends, a form feed, a byte order mark, or no line end at its end"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return "the file can't be parsed"
    return ""


def write_patch(script: Path, folder: Path, target: Path) -> str:
    """Write the plan that was kept as a diff of a script and its own modules, and say what is in it.

    Args:
        script: its path.
        folder: where it was started.
        target: the diff.
    """
    plans = [_plan_of(each.session.run, each.journal.kept) for each in MODELS.values() if each.journal.kept]
    if not plans:
        return "no patch: nothing was kept"
    folder = folder.resolve()
    files = _own_files(script, folder)
    root = Path(os.path.commonpath([folder, *files]))  # patch refuses paths that lead out of where it runs
    whole = ScriptPatch()
    try:
        for file in files:
            with file.open(encoding="utf-8", newline="") as text:
                name, source = file.relative_to(root).as_posix(), text.read()
            rest = [plan._replace(choices=_missing(plan, plans, whole.written)) for plan in plans]
            part = patch_script(source, name, rest)
            left = {**part.left, **whole.left}  # the reason is that of the script itself
            whole = ScriptPatch(whole.diff + part.diff, [*whole.written, *part.written], left)
        if whole.written:
            save("--patch", target, whole.diff)
    except (OSError, ValueError) as error:
        return f"no patch: {error}"
    reasons = "; ".join(f"{name} is left out: {why}" for name, why in whole.left.items() if name not in whole.written)
    if not whole.written:
        return f"no patch: {reasons}"
    where = "" if root == folder else f" -d {shlex.quote(str(root))}"
    how = f"patch -p1{where} < {shlex.quote(str(target))}"
    return f"wrote {target} with {', '.join(whole.written)} ({how})" + (f"; {reasons}" if reasons else "")


def _label(strategy: str, plan: ModelPlan, plans: Sequence[ModelPlan]) -> str:
    return strategy if len(plans) == 1 else f"{strategy} of {plan.model}"


def _missing(plan: ModelPlan, plans: Sequence[ModelPlan], written: list[str]) -> dict[str, Any]:
    return {name: setting for name, setting in plan.choices.items() if _label(name, plan, plans) not in written}


def _plan_of(run: Run, choices: Mapping[str, Any]) -> ModelPlan:
    kinds = Optimizers(run.optimizers).kinds
    model, optimizer = type(run.inner).__name__, ", ".join(sorted(kinds))
    has_workers = bool(getattr(run.loader, "num_workers", 0))
    return ModelPlan(choices, model, optimizer, run.device.type, run.observed.returns_tensor, has_workers)


def _own_files(script: Path, folder: Path) -> list[Path]:
    """Return the script, then the modules that it has imported from around it or from where it was started."""
    script = script.resolve()
    loaded = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    paths = [Path(file) for name, file in loaded.items() if file.endswith(".py") and name[:6] != "accel."]
    files = [path.resolve() for path in paths if path.is_absolute() and path.is_file()]  # torch.ops says "_ops.py"
    on_path = [Path(each).resolve() for each in sys.path if each]
    around = [script.parent, folder, *filter(script.is_relative_to, on_path)]  # the root of its repository, say
    installed = Path(sys.prefix).resolve()
    own = (each for each in files if any(map(each.is_relative_to, around)) and not each.is_relative_to(installed))
    return list(dict.fromkeys([script, *own]))


def _applied(source: str, edits: list[Edit]) -> str:
    """Return the source with its edits; of those at one place the first comes first."""
    merged: dict[tuple[int, int], str] = {}
    for edit in edits:
        merged[edit.start, edit.end] = merged.get((edit.start, edit.end), "") + edit.text
    for (start, end), text in sorted(merged.items(), reverse=True):
        source = source[:start] + text + source[end:]
    return source


class _Source:
    """A script's syntax tree, and the places in it that strategies change."""

    def __init__(self, source: str, plan: ModelPlan, *, is_alone: bool) -> None:
        self.device, self.has_workers = plan.device, plan.has_workers
        self._is_alone, self._returns_tensor = is_alone, plan.returns_tensor
        self._optimizer, self._model = plan.optimizer, plan.model
        self._tree = ast.parse(source)
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the position of a node's line and column, which counts bytes, in characters."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Return where a node ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.end_lineno, node.end_col_offset)

    def calls(self, name: str) -> list[ast.Call]:
        """Return the calls of a name, alone or as an attribute."""
        return [node for node in ast.walk(self._tree) if isinstance(node, ast.Call) and _called(node) == name]

    def optimizer(self) -> ast.Call:
        """Return the call that makes the optimizer."""
        calls = self.calls(self._optimizer)
        is_only = len(calls) == 1
        if not is_only:
            made = {name for call in self.calls(self._model) for name in _targets(self.statement(call))}
            calls = [call for call in calls if made & {_trained(call)}]
        if len(calls) != 1:
            raise NotWritable(f"{self._optimizer}(…) must stand once in the file, found {len(calls)} times")
        around = [each for each in ast.walk(self._tree) if isinstance(each, _FUNCTIONS) and calls[0] in ast.walk(each)]
        if around and is_only and not self._is_alone:
            raise NotWritable("the optimizer is made in a function, which may make that of another model too")
        return calls[0]

    def model(self) -> str:
        """Return the expression of the model whose parameters the optimizer gets."""
        if model := _trained(self.optimizer()):
            return model
        raise NotWritable(f"the call of {self._optimizer} does not name the model's parameters()")

    def before_optimizer(self, line: str) -> Edit:
        """Return the edit that puts a line before the statement that makes the optimizer."""
        statement = self.statement(self.optimizer())
        start = self._starts[statement.lineno - 1]
        indent = self._lines[statement.lineno - 1][: statement.col_offset]
        if indent.strip():
            raise NotWritable("the optimizer is not made on a line of its own")
        return Edit(start, start, f"{indent}{line}\n")

    def after_imports(self, lines: str) -> Edit:
        """Return the edit that puts lines after the last import at the top of the file; `torch` is a name there."""
        top = itertools.takewhile(lambda each: not isinstance(each, _BODIES), self._tree.body)
        imports = [each for each in top if isinstance(each, ast.Import | ast.ImportFrom)]
        if not imports:
            raise NotWritable("the file has no import at its top")
        if "torch." in lines and not self.names_torch():
            lines = f"import torch\n{lines}"
        end = self._starts[imports[-1].end_lineno or imports[-1].lineno]
        return Edit(end, end, f"{lines}\n")

    def names_torch(self) -> bool:
        """Tell whether `torch` is imported, by that name, at the top of the file."""
        top = itertools.takewhile(lambda each: not isinstance(each, _BODIES), self._tree.body)
        imports = (name for each in top if isinstance(each, ast.Import) for name in each.names if not name.asname)
        return any(each.name.partition(".")[0] == "torch" for each in imports)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the smallest statement that a node is in."""
        around = [each for each in ast.walk(self._tree) if isinstance(each, ast.stmt) and node in ast.walk(each)]
        return min(around, key=lambda each: len(list(ast.walk(each))))

    def loop(self) -> ast.For:
        """Return the innermost loop that calls `backward`."""
        loops = [each for each in ast.walk(self._tree) if isinstance(each, ast.For) and _does_backward(each)]
        inner = [each for each in loops if not any(other is not each and other in ast.walk(each) for other in loops)]
        if len(inner) != 1:
            raise NotWritable(f"one loop must call backward(), found {len(inner)}")
        return inner[0]

    def loader(self) -> ast.Call:
        """Return the call that makes the loader of that loop; the only DataLoader of the script if names differ."""
        calls = self.calls("DataLoader")
        names = {node.id for node in ast.walk(self.loop().iter) if isinstance(node, ast.Name)}
        named = [call for call in calls if names & _targets(self.statement(call))]
        is_another = not named and any(names & _targets(each) for each in ast.walk(self._tree))
        if is_another or len(named or calls) != 1:
            raise NotWritable(f"one DataLoader(…) must feed the loop, found {0 if is_another else len(named or calls)}")
        return (named or calls)[0]

    def argument(self, call: ast.Call, name: str, value: str) -> Iterator[Edit]:
        """Yield the edits that set a keyword argument of a call."""
        for keyword in call.keywords:
            if keyword.arg == name:
                yield Edit(self.offset(keyword.value.lineno, keyword.value.col_offset), self.end(keyword.value), value)
                return
        from_dicts = [keyword.value for keyword in call.keywords if keyword.arg is None]
        if from_dicts:  # which may hold this one already
            start, end = self.offset(from_dicts[0].lineno, from_dicts[0].col_offset), self.end(from_dicts[0])
            if len(from_dicts) > 1:
                raise NotWritable(f"the call of {_called(call)} takes arguments from dicts; set {name}={value} there")
            yield from (Edit(start, start, "{**"), Edit(end, end, f', "{name}": {value}}}'))
            return
        last = max([*call.args, *(keyword.value for keyword in call.keywords)], key=self.end, default=None)
        if last is None:
            raise NotWritable(f"the call of {_called(call)} has no arguments")
        yield Edit(self.end(last), self.end(last), f", {name}={value}")

    def in_context(self, context: str) -> Edit:
        """Return the edit that puts the statement with the model's call under a `with`."""
        model = self.model().rpartition(".")[2]
        inside = [node for node in ast.walk(self.loop()) if isinstance(node, ast.Call) and _called(node) == model]
        statements = list({id(each): each for each in map(self.statement, inside)}.values())
        if len(statements) != 1 or not isinstance(statements[0], ast.Assign | ast.Expr | ast.AugAssign):
            raise NotWritable(f"one statement of the loop must call {model}(…), found {len(statements)}")
        (statement,) = statements
        assert statement.end_lineno is not None
        first, last = statement.lineno - 1, statement.end_lineno
        indent = self._lines[first][: statement.col_offset]
        if indent.strip() or self._lines[last - 1].encode()[statement.end_col_offset :].strip().startswith(b";"):
            raise NotWritable("the model is not called on a line of its own")
        text = f"{indent}with {context}:\n" + "".join("    " + line for line in self._lines[first:last])
        if isinstance(statement, ast.Assign) and statement.value in inside:
            if not self._returns_tensor:
                raise NotWritable("the model returns more than one tensor, and each must be cast back to float32")
            text = text.rstrip("\n") + "\n" + _to_float32(statement.targets, indent)
        elif not _does_backward(statement) and not _targets(statement) & _losses(self.loop()):
            raise NotWritable(f"what {model}(…) returns must be named, or the loss be made of it in the same statement")
        return Edit(self._starts[first], self._starts[last], text)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_BODIES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _trained(optimizer: ast.Call) -> str:
    """Return the expression of the model whose parameters the call of an optimizer names; '' if it names not one."""
    given = [node for node in ast.walk(optimizer) if isinstance(node, ast.Call)]
    named = [node.func for node in given if _called(node) in _PARAMETERS]
    owners = [each.value for each in named if isinstance(each, ast.Attribute)]
    stored = {node.id for node in ast.walk(optimizer) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.arg for node in ast.walk(optimizer) if isinstance(node, ast.arg)}
    names = {node.id for owner in owners for node in ast.walk(owner) if isinstance(node, ast.Name)}
    texts = {ast.unparse(owner) for owner in owners if not isinstance(owner, ast.Call)}
    return texts.pop() if len(texts) == len(owners) == 1 and not names & stored else ""


_PARAMETERS = ("parameters", "named_parameters")


def _backwards(part: ast.stmt) -> list[ast.Call]:
    return [node for node in ast.walk(part) if isinstance(node, ast.Call) and _called(node) == "backward"]


def _does_backward(part: ast.stmt) -> bool:
    return bool(_backwards(part))


def _losses(loop: ast.For) -> set[str]:
    """Return the names on which `backward` is called, or which it is called with."""
    return {node.id for call in _backwards(loop) for node in ast.walk(call) if isinstance(node, ast.Name)}


def _targets(statement: ast.AST) -> set[str]:
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _to_float32(targets: list[ast.expr], indent: str) -> str:
    """Return the line that gives a loss float32, as accel's autocast does."""
    if not all(isinstance(each, ast.Name) for each in targets):
        raise NotWritable("the model's outputs are unpacked, and each of them must be cast back to float32")
    return "".join(f"{indent}{name} = {name}.float()\n" for name in map(ast.unparse, targets))


# -- strategies --------------------------------------------------------------------------------------------------------


def _setting(text: str, script: _Source, setting: Any) -> Iterator[Edit]:
    """Put a setting of the process after the imports."""
    yield script.after_imports(text.format(setting=setting))


def _channels_last(script: _Source, setting: Any) -> Iterator[Edit]:
    if not script.names_torch():
        raise NotWritable(_NO_TORCH)
    yield script.before_optimizer(f"{script.model()}.to(memory_format=torch.channels_last)")


def _compile(script: _Source, setting: Any) -> Iterator[Edit]:
    if setting not in (None, WHOLE):
        raise NotWritable("accel has compiled the blocks that the model repeats; call compile() of each in its place")
    if (model := script.model()) == "self":
        raise NotWritable("self.compile() is of no use to methods that are called by other names")
    yield script.before_optimizer(f"{model}.compile()")


_NO_TORCH = "the file must import torch by that name, at its top"


def _fused(script: _Source, setting: Any) -> Iterator[Edit]:
    yield from script.argument(script.optimizer(), str(setting), "True")


def _workers(script: _Source, setting: Any) -> Iterator[Edit]:
    if not isinstance(setting, int):
        raise NotWritable("a DataLoader has no threads; accel.ContinuousLoader(loader) has")
    if script.has_workers:
        raise NotWritable("the loader's own workers have begun epochs early; accel.ContinuousLoader(loader) does so")
    # No persistent workers: their later epochs draw no seed, so that the next one is shuffled otherwise.
    yield from script.argument(script.loader(), "num_workers", str(setting))


def _pinned(script: _Source, setting: Any) -> Iterator[Edit]:
    yield from script.argument(script.loader(), "pin_memory", "True")


def _autocast(script: _Source, setting: Any) -> Iterator[Edit]:
    if not script.names_torch():
        raise NotWritable(_NO_TORCH)
    yield script.in_context(f'torch.autocast("{script.device}", dtype=torch.bfloat16)')


_WRITERS: dict[str, Callable[[_Source, Any], Iterator[Edit]]] = {
    "channels_last": _channels_last,
    "torch_compile": _compile,
    "autocast_bf16": _autocast,
    "tf32": partial(_setting, 'torch.set_float32_matmul_precision("high")'),
    "cudnn_benchmark": partial(_setting, "torch.backends.cudnn.benchmark = True"),
    "flush_denormal": partial(_setting, "torch.set_flush_denormal(True)"),
    "intraop_threads": partial(_setting, "torch.set_num_threads({setting})"),
    "fused_optimizer": _fused,
    "loader_workers": _workers,
    "pin_memory": _pinned,
    "allocator": partial(
        _setting,
        "import ctypes\n"
        "ctypes.CDLL(None).mallopt(-4, 0)  # glibc: no mmap for single requests,\n"
        "ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # and freed memory stays with the process",
    ),
}
"""Strategy → what writes it; strategies that need accel at run time are not among them."""
