"""A window of a few traced steps, recorded by kineto.

A window is two or three steps long: torch's profiler slows a step down while it is on, and closing it takes longer than
it was open for. The low-level `torch.autograd.profiler.profile` records, and its raw events are read without building
the operator tree in Python: 5 µs each; `profile.function_events` takes 23 to 70 µs. Measured on a step of 3 ms with 290
operators, 960 events, on one core (torch 2.13, Zen 4): 0.5 ms to start, 0.8 ms more for each step, 32 ms to stop after
three, 8 ms to export.

Kineto's tree holds Python's calls with the line each was made from. A call of a method
(`loss.item()`) is among them; what goes through a type's slot (`float(loss)`, `if loss > 0`) is
not, and gets the last recorded line of its function.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler as _autograd_profiler

from accel.profiler.errors import AccelError
from accel.profiler.evidence import TraceSummary
from accel.profiler.system.loop_source import is_users
from accel.profiler.trace.digest import digest, located
from accel.profiler.trace.events import OperatorCall, Trace, Wait, Work
from accel.profiler.trace.operators import needs_scalars

_TAKEN = "no trace: the script uses torch's profiler itself, and a process can have only one at a time"


_NO_KERNELS = (
    "GPU kernels: kineto recorded none; another tool uses CUPTI, the driver does not permit it (ERR_NVGPUCTRPERM), or "
    "this torch can't trace the device"
)


# torch's profiler has no types.
profiler: Any = _autograd_profiler


class WindowTaken(AccelError, RuntimeError):
    """The process's only profiler is in use by the script."""


class Window:
    """Records a few training steps; start and stop it between two steps, on the training thread.

    It yields: if the script starts a profiler of its own while the window is open, the window closes first, and `stop`
    says so.

    Args:
        device: where the model is; GPU work is recorded for a CUDA device.
        stacks: find the script's line of each wait for a CUDA device. Python's calls are then recorded too, 0.08 µs
            each, which doubles what tracing costs a step and adds 25 ms to `stop`: gaps between kernels look longer
            than they are. Ignored without a CUDA device, and where `sys.setprofile` is used.

    Attributes:
        unseen: one sentence on what `stop` could not read, '' if nothing.
    """

    def __init__(self, device: torch.device, *, stacks: bool = False) -> None:
        self.unseen = ""
        self._cuda = _traceable(torch.device(device))
        self._blind = torch.device(device).type != "cpu" and self._cuda is None
        self._stacks = stacks and self._cuda is not None and sys.getprofile() is None
        self._is_open = False
        self._profile: Any
        self._unhook: Callable[[], None]
        self._began_ns = 0

    def start(self) -> None:
        """Start recording.

        Raises:
            WindowTaken: if the script has a profiler, recording or waiting for its turn in its schedule.
        """
        if _is_taken():
            raise WindowTaken(_TAKEN)
        with _quiet():
            self._profile = profiler.profile(
                use_kineto=True,
                use_device=None if self._cuda is None else "cuda",
                record_shapes=True,
                with_stack=self._stacks,
            )
            if self._cuda is not None:
                torch.cuda.synchronize(self._cuda)  # work of earlier steps does not belong to the window
            try:
                self._profile.__enter__()
            except RuntimeError as error:  # a C++ tool that the checks above don't detect
                profiler._run_on_profiler_stop()
                raise WindowTaken(f"no trace: torch's profiler does not start ({error})") from error
        self._is_open = True
        self._unhook = _before_another(self._give_way)
        self._began_ns = time.time_ns()

    def stop(self, steps: int, *, shared: bool = False) -> TraceSummary:
        """Stop recording and return the summary of so many steps; takes about 10 µs an operator or kernel.

        Raises:
            WindowTaken: if the script has started a profiler meanwhile.
        """
        if not self._is_open:
            raise WindowTaken(_TAKEN)
        closing_ns = ended_ns = time.time_ns()
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
            ended_ns = time.time_ns()
        with _no_collection():
            self._close()
            trace = read(
                self._profile.kineto_results,
                window_ns=(self._began_ns, ended_ns),
                closing_ns=closing_ns,
                gpu=self._cuda,
                stacks=self._stacks,
            )
            if self._blind or trace.works == []:
                # The host's times would pass for the device's.
                self.unseen = _NO_KERNELS
                trace = Trace(window=trace.window, calls=[])
            return digest(trace, steps, shared=shared)

    def export(self, path: Path) -> None:
        """Write the stopped window, once, as a Chrome trace (ui.perfetto.dev): the whole file or none.

        Raises:
            OSError: if the file can't be written.
        """
        part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.touch()  # raises where kineto would only complain on stderr
            with _quiet():
                self._profile.kineto_results.save(str(part))
            if part.stat().st_size == 0:
                raise OSError(f"kineto wrote no trace to {part}")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def _give_way(self) -> None:
        # This may be called in another thread, where kineto refuses to stop what this thread started; the script's
        # profiler then replaces this session itself.
        with suppress(RuntimeError):
            if self._is_open:
                self._close()

    def _close(self) -> None:
        self._is_open = False
        self._unhook()
        with _quiet():
            self._profile.__exit__(None, None, None)


def traced(
    device: torch.device, steps: int, file: Path | None, unseen: list[str], *, shared: bool
) -> Generator[None, object, TraceSummary | None]:
    """Trace so many steps as they pass; on a GPU one more with Python's stacks, which tells lines and no times.

    Args:
        device: where the model is.
        steps: as many pass, whether or not they can be traced.
        file: where the Chrome trace goes; None writes none.
        unseen: gets a sentence on what could not be read.
        shared: other processes hold cores.
    """
    summary = yield from _passing(Window(device), steps, file, unseen, shared)
    if device.type == "cuda":
        lines = yield from _passing(Window(device, stacks=True), 1, None, unseen, shared)
        if summary is not None and lines is not None:
            summary.syncs = located(summary.syncs, lines.syncs)
    return summary


def _passing(
    window: Window, steps: int, file: Path | None, unseen: list[str], shared: bool
) -> Generator[None, object, TraceSummary | None]:
    try:
        window.start()
    except WindowTaken as error:
        unseen.append(str(error))
        for _ in range(steps):
            yield
        return None
    try:
        for _ in range(steps):
            yield
    finally:  # also if the script ends within the window
        summary = _closed(window, steps, file, unseen, shared)
    return summary


def _closed(window: Window, steps: int, file: Path | None, unseen: list[str], shared: bool) -> TraceSummary | None:
    try:
        summary = window.stop(steps, shared=shared)
        if file is not None:
            window.export(file)
            summary.file = file.name
    except WindowTaken as error:  # the script has started a profiler of its own meanwhile
        unseen.append(str(error))
        return None
    except OSError as error:
        unseen.append(f"the trace could not be written: {error}")
    unseen += [window.unseen] if window.unseen else []
    return summary


def _traceable(device: torch.device) -> int | None:
    """Return the index of the CUDA device whose work can be traced, None if there is none."""
    if device.type != "cuda" or profiler.ProfilerActivity.CUDA not in profiler._supported_activities():
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _is_taken() -> bool:
    # A torch.profiler.profile counts its steps from its construction to the end of its `with`, also while its schedule
    # makes it wait; starting another one then would cancel its warm-up.
    scheduled = "ProfilerStep" in profiler.KinetoStepTracker._step_dict
    return scheduled or profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()


def _before_another(call: Callable[[], None]) -> Callable[[], None]:
    """Arrange for `call` to be called before another profiler starts; return a function that undoes that."""
    original = profiler.profile._prepare_trace

    def prepare(other: Any) -> None:
        call()
        original(other)

    def undo() -> None:
        if profiler.profile._prepare_trace is prepare:
            profiler.profile._prepare_trace = original

    profiler.profile._prepare_trace = prepare
    return undo


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector: the many small objects would trigger it, 0.1 to 0.3 s each time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence kineto and the warnings of torch's profiler.

    Kineto reads its level when it starts for the first time in the process; torch 2.13 prints a line at each start and
    stop ("USDT: … profiler_start") at any level below 6.
    """
    level = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = level or "6"
    # Not catch_warnings: it resets Python's record of the warnings shown, and the script would show them again.
    rules: Any = warnings.filters
    ignore = ("ignore", None, Warning, None, 0)
    rules.insert(0, ignore)
    try:
        yield
    finally:
        rules.remove(ignore)
        if level is None:
            del os.environ["KINETO_LOG_LEVEL"]


# -- what the profiler of torch has recorded ---------------------------------------------------------------------------


# Calls of the driver and the runtime. In torch 2.9 only their names distinguish them from operators.
_RUNTIME = re.compile(r"(cuda|cu|hip)[A-Z]\w*$")
# Python's calls, which are recorded with stacks; torch 2.9 marks them in no other way either.
_PYTHON = re.compile(r".+\(\d+\): .|<built-in |nn\.Module: ")
_NO_OPERATORS = {
    "[memory]",
    "[OutOfMemory]",
    "profiler::_record_function_enter",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
    # CUPTI's records of its own overhead.
    "Activity Buffer Request",
    "Buffer Flush",
    "Command Buffer Full",
    "Instrumentation",
    "Lazy Function Loading",
    "Resource",
    "Runtime Triggered Module Loading",
}


def read(results: Any, *, window_ns: tuple[int, int], closing_ns: int, gpu: int | None, stacks: bool = False) -> Trace:
    """Return what kineto recorded.

    Args:
        results: what `torch.autograd.profiler.profile` keeps as `kineto_results`.
        window_ns: when the window was open, ns since the epoch; the trace's µs begin with it.
        closing_ns: when it began to close; a later wait without an operator is the window's own.
        gpu: index of the GPU whose work to read, others are left out; None for none.
        stacks: whether Python's calls were recorded, so that waits can be given their lines.
    """
    zero = window_ns[0]
    trace = Trace(window=(0.0, (window_ns[1] - zero) / 1e3), calls=[], works=None if gpu is None else [])
    runtime: dict[int, Any] = {}
    device: list[Any] = []
    for event in results.events():
        name = event.name()
        if event.is_user_annotation() or name in _NO_OPERATORS:
            if name.startswith("Optimizer.step#") and event.device_type() == DeviceType.CPU:
                start = (event.start_ns() - zero) / 1e3
                trace.updates.append((start, start + event.duration_ns() / 1e3))
            continue
        if event.device_type() != DeviceType.CPU:
            device.append(event)
        elif _RUNTIME.match(name):
            runtime[event.correlation_id()] = event
        elif not event.is_async() and not (stacks and _PYTHON.match(name)):
            trace.calls.append(_call(event, name, zero))
    if trace.works is not None:
        mine = [event for event in device if event.device_index() == gpu]
        trace.works += [_work(event, runtime.get(event.correlation_id()), zero) for event in mine]
        copied = {event.correlation_id(): event.end_ns() for event in mine if work_kind(event.name()) == "copy out"}
        trace.waits = _waits(runtime, copied, zero, closing_ns)
        if stacks:
            _locate(trace.waits, results)
    return trace


def _call(event: Any, name: str, zero: int) -> OperatorCall:
    start = (event.start_ns() - zero) / 1e3
    return OperatorCall(
        name=name,
        start=start,
        end=start + event.duration_ns() / 1e3,
        thread=event.start_thread_id(),
        id=event.correlation_id(),
        shapes=event.shapes(),
        dtypes=event.dtypes(),
        scalars=event.concrete_inputs() if needs_scalars(name) else (),
    )


def _work(event: Any, launch: Any, zero: int) -> Work:
    start = (event.start_ns() - zero) / 1e3
    return Work(
        name=event.name(),
        start=start,
        end=start + event.duration_ns() / 1e3,
        launch=None if launch is None else (launch.start_ns() - zero) / 1e3,
        operator=event.linked_correlation_id(),
        kind=work_kind(event.name()),
    )


def work_kind(name: str) -> Literal["kernel", "memory", "copy in", "copy out"]:
    """Return what a device event is, by CUPTI's name for it."""
    if name.startswith("Memcpy HtoD"):
        return "copy in"
    if name.startswith("Memcpy DtoH"):
        return "copy out"
    return "memory" if name.startswith(("Memcpy ", "Memset ")) else "kernel"


def _waits(runtime: dict[int, Any], copied: dict[int, int], zero: int, closing_ns: int) -> list[Wait]:
    """Return the runtime calls that returned only after the device had done something.

    `copied` has when the copies to the host were done, ns, by the correlation id of the call that asked for them; one
    into pinned memory goes on after its call has returned, which then is no wait.
    """
    waits = []
    for number, event in runtime.items():
        name, start_ns = event.name(), event.start_ns()
        operator = event.linked_correlation_id()
        blocks = "Synchronize" in name or copied.get(number, start_ns + event.duration_ns() + 1) <= event.end_ns()
        if blocks and (operator or start_ns < closing_ns):
            start = (start_ns - zero) / 1e3
            end = start + event.duration_ns() / 1e3
            waits.append(Wait(name=name, start=start, end=end, operator=operator, call=number))
    return waits


def _locate(waits: list[Wait], results: Any) -> None:
    """Give each wait its line in the user's script, by its operator or else by the runtime call itself."""
    operators = {wait.operator for wait in waits}
    calls = {wait.call for wait in waits}
    locations = users_lines(results.experimental_event_tree(), operators, calls)
    for wait in waits:
        location = locations.get((True, wait.operator)) or locations.get((False, wait.call)) or NOWHERE
        wait.file, wait.line = location


Location = tuple[str, int]

NOWHERE: Location = ("", 0)


def users_lines(
    roots: Iterable[Any],
    operators: Container[int],
    calls: Container[int] = (),
    is_file: Callable[[str], bool] = is_users,
) -> dict[tuple[bool, int], Location]:
    """Return the locations of some operators and runtime calls, by correlation id, in the user's files.

    Args:
        roots: kineto's `experimental_event_tree()`, recorded with stacks.
        operators: correlation ids of the operators to find.
        calls: those of the runtime calls; they are counted apart.
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
        # A function of the user's begins at its own line, and a call is made at its caller's.
        here = (_location(node.extra_fields.callsite, is_file) if tag == "PyCall" else None) or location
        for child in node.children:
            if child.tag.name in ("PyCall", "PyCCall"):
                here = _location(child.extra_fields.caller, is_file) or here
            pending.append((child, here))
    return locations


def _location(frame: Any, is_file: Callable[[str], bool]) -> Location | None:
    file = full_path(frame.file_name)
    return (file, frame.line_number) if is_file(file) else None


@lru_cache(maxsize=4096)
def full_path(file: str) -> str:
    """Return the path of a file whose beginning kineto cut off because it is on `sys.path`."""
    if os.path.isabs(file) or file.startswith("<"):
        return file
    paths = (os.path.join(folder or os.getcwd(), file) for folder in sys.path)
    return next((path for path in paths if os.path.isfile(path)), file)
