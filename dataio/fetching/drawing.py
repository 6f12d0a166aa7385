"""Make batches from random states of their own, and leave the generators alone where nothing draws from them.

The generators of Python, torch and numpy are one for all threads. While a batch is made from states of its own, another
thread that draws would draw from these, and what it drew before would come again. So states are written only

| while | is written |
|---|---|
| this is the only thread that could draw | all three, and put back |
| others could draw | the generators from which fetching was seen to draw, and put back; no other |

Whether fetching draws shows in the states before and after. Where other threads could have drawn too, the draws must be
recorded as well (`DrawRecorder`): then that batch is made again, from its own states.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from accel.dataio.fetching.randomness import Stream, streams

# Batches for which no random number is drawn, after which none is looked for any more: 0.1 ms each.
_TRIED = 16
_NEVER = 1 << 62


class SeparateStates:
    """Makes calls from random states of their own."""

    def __init__(self) -> None:
        self._before: list[tuple[Stream, Any]] = []

    def call(
        self,
        function: Callable[[Any], Any],
        argument: Any,
        seeded: Sequence[Stream],
        seed: int,
        *,
        listen: bool,
        may_write: Callable[[], bool] = lambda: True,
    ) -> tuple[Any, list[Stream]]:
        """Return `function(argument)`, and the generators that it drew from, which are as they were before.

        Args:
            function: is called.
            argument: with this.
            seeded: generators to be seeded for it.
            seed: what with.
            listen: other threads could draw meanwhile: only what was recorded counts.
            may_write: asked once the call has ended; if False, nothing is put back and nothing counts as drawn.
        """
        before = [(stream, stream.read()) for stream in streams()]
        self._before = [(stream, state) for stream, state in before if stream in seeded]
        recorder, drawn, began = DrawRecorder(), list[Stream](), before
        try:
            for stream in seeded:
                stream.seed(seed)
            began = [(stream, stream.read()) for stream, _ in before]
            result = recorder.call(function, argument) if listen else function(argument)
        finally:
            moved = [stream for stream, state in began if stream.read() != state]
            if may_write():
                drawn = [each for each in moved if not listen or each in seeded or each.name in recorder.recorded]
                self._before = [(stream, state) for stream, state in before if stream in seeded or stream in drawn]
                self.put_back()
        return result, drawn

    def put_back(self) -> None:
        """Put back what is not, where Ctrl-C came between."""
        for stream, state in self._before:
            stream.write(state)
        self._before = []


class Drawing:
    """Knows from which generators fetching draws, as far as was seen."""

    def __init__(self) -> None:
        self._apart = SeparateStates()
        self._drawn: list[Stream] = []
        self._quiet = 0

    @property
    def draws(self) -> bool:
        """True if fetching was seen to draw random numbers."""
        return bool(self._drawn)

    def look_again(self) -> None:
        """Look again: what is fetched from has changed."""
        self._quiet = min(self._quiet, 0)

    def put_back(self) -> None:
        """Put back the loop's random states, where Ctrl-C came between."""
        self._apart.put_back()

    def make(self, fetch: Callable[[Any], Any], indices: Any, seed: int | None) -> Any:
        """Return the batch of `indices`, made from random states that `seed` gives; None for those there are."""
        if seed is None or self._quiet >= _TRIED:
            return fetch(indices)
        while True:
            alone = not others_could_draw()
            seeded = streams() if alone else self._drawn
            batch, drawn = self._apart.call(fetch, indices, seeded, seed, listen=not alone)
            new = [stream for stream in drawn if stream not in self._drawn]
            self._drawn += new
            # Counted in a row: one draw, however late in the first batches, and all batches are seeded.
            self._quiet = -_NEVER if self._drawn else self._quiet + 1
            if alone or not new:
                return batch


def others_could_draw(waiting: Collection[int] = ()) -> bool:
    """Return whether a thread beside this one could draw random numbers now.

    Args:
        waiting: threads, by identifier, that wait for this one. Those of this package draw none.
    """
    named = threading.enumerate()
    mine = {threading.get_ident(), *waiting}
    unnamed = len(sys._current_frames()) > len(named)  # started by native code
    return unnamed or any(each.ident not in mine and not each.name.startswith("accel-") for each in named)


class DrawRecorder:
    """Records which global generators this thread draws from while it makes a call.

    Operators of torch report their draws. Python's functions are recorded by a profiling hook. Those of numpy are not:
    for them a function must run that names one. What native code draws on its own, as a `functools.partial` of a
    generator's method does, is not recorded. While another profiling hook is in place, everything counts as recorded.

    Attributes:
        recorded: names of the generators, as in `Stream`.
    """

    def __init__(self) -> None:
        self.recorded: set[str] = set()

    def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Return `function(argument)`."""
        if sys.getprofile() is not None:
            self.recorded |= {stream.name for stream in streams()}
            return function(argument)
        operators = _Operators(self.recorded, self._hook)
        try:
            with operators:
                return function(argument)
        except BaseException:
            operators.remove()  # Ctrl-C may come within `__enter__`, or before `__exit__`
            raise

    def _hook(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            if owner is _PYTHONS_OWN:
                self.recorded.add("python")
            elif owner is torch.default_generator:
                self.recorded.add("torch")
        elif event == "call" and "numpy" not in self.recorded and _names_numpys(frame.f_code, frame.f_globals):
            self.recorded.add("numpy")


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Listens to torch's operators, and to Python's functions by a profiling hook."""

    def __init__(self, recorded: set[str], hook: Callable[[FrameType, str, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded, self._hook = recorded, hook

    def __enter__(self) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first batch would import torch._dynamo: seconds

    def remove(self) -> None:
        """Stop listening, where an interruption has left it on."""
        sys.setprofile(None)
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") in (
            None,
            torch.default_generator,
        ):
            self._recorded.add("torch")
        return func(*args, **kwargs)


_PYTHONS_OWN = random.getstate.__self__  # type: ignore[attr-defined]
_GENERATORS = {"default_rng", "Generator", "RandomState", "SeedSequence", "BitGenerator", "PCG64", "Philox", "MT19937"}


def _names_numpys(code: CodeType, names: dict[str, Any]) -> bool:
    """Return whether code names a function of numpy's global generator."""
    numpy = sys.modules.get("numpy")
    if numpy is None or code.co_name == "<module>":  # an import names much
        return False
    used = set(code.co_names)
    functions = {name for name in used if name != "random" and _is_numpys(getattr(numpy.random, name, None))}
    if not functions and ("random" not in used or used & _GENERATORS):
        return False
    modules = (numpy, numpy.random, numpy.random.mtrand)
    named = [names.get(name) for name in used]
    return "numpy" in used or any(any(each is m for m in modules) or _is_numpys(each) for each in named)


def _is_numpys(thing: Any) -> bool:
    """Return whether `thing` is a function that draws from numpy's global generator, or seeds it."""
    mtrand = sys.modules["numpy.random.mtrand"]
    if thing is None or isinstance(thing, type):
        return False
    return getattr(thing, "__self__", None) is mtrand._rand or thing in (mtrand.seed, mtrand.ranf, mtrand.sample)
