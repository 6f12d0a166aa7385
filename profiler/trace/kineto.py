"""Kineto's raw events as plain ones, and the lines of the user's script that they come from.

Reading one costs about 5 µs; `profile.function_events`, from which torch.profiler makes its tables,
takes 23 to 70 µs.

Kineto's tree holds Python's calls with the line each was made from. A call of a method
(`loss.item()`) is among them; what goes through a type's slot (`float(loss)`, `if loss > 0`) is
not, and gets the last recorded line of its function.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from typing import Any, Literal

from torch._C._autograd import DeviceType

from accel.profiler.system.loop_source import is_users
from accel.profiler.trace.events import OperatorCall, Trace, Wait, Work
from accel.profiler.trace.operators import needs_scalars

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
        closing_ns: when the window began to close; a later wait without an operator is the window's own.
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

    Args:
        runtime: all runtime calls, by correlation id.
        copied: when the copies to the host were done, ns, by the correlation id of the call that asked for them; a copy
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
