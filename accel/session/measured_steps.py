"""The steps of an action: which are measured, and what the profiler observes in them.

Measured are those that are like most others, or, in an action that counts one, those of an epoch.
An epoch's first step includes starting the loader, and its last may have fewer samples. Where every
epoch has one batch, or batches differ in size, as those of a token budget do, nothing can be told
apart, and every step counts.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable

import torch
from torch import Tensor

from accel.profiler.evidence import Evidence, ThreadShare
from accel.profiler.host import ThreadMeter, ThreadTime
from accel.profiler.loop import backward, facts
from accel.profiler.loop.clock import StepClock
from accel.profiler.loop.device import DeviceSteps
from accel.profiler.phases import Measurement
from accel.profiler.system.meters import DdpWait
from accel.run.context import Run
from accel.search.actions import Action, Result

_LOOKED_AT, _FEW = 64, 8
"""Steps by which the usual one is known; of fewer, an epoch's first is always odd."""
_USUAL = 0.5
"""Share of them that has one size, or is no epoch's first, from which on another one is odd."""
_JUDGED_BY = 5
"""Steps by whose batches the usual shape is judged, at the least."""
_USUAL_SHAPE = 0.8
"""Share of them that has it: one odd batch in four is not a variation."""
_STILL_USUAL = 0.5
"""For one that was usual before: of a share near the other five steps would tell by chance."""
_REPEATED = 50
"""Steps that count as an epoch where the loop repeats batches, and no epoch begins any more."""


class UsualSteps:
    """Know the usual step by the last ones.

    Attributes:
        tells_sizes: steps of another size are odd. Ranks must end an action at the same step, and may differ in this.
    """

    def __init__(self) -> None:
        self.tells_sizes = True
        self._sizes: deque[int] = deque(maxlen=_LOOKED_AT)
        self._firsts: deque[bool] = deque(maxlen=_LOOKED_AT)
        self._usual: int | None = None

    @property
    def sizes(self) -> Collection[int]:
        """Samples of the last steps."""
        return self._sizes

    @property
    def size(self) -> int:
        """Samples of most steps, 0 if unknown."""
        return Counter(self._sizes).most_common(1)[0][0] if self._sizes else 0

    def add(self, measured: Measurement) -> None:
        """Take in a step."""
        self._sizes.append(measured.samples)
        self._firsts.append(measured.first)

    def is_odd(self, measured: Measurement) -> bool:
        """Return whether a step that was taken in should be left out."""
        if measured.first and (len(self._firsts) < _FEW or sum(self._firsts) <= _USUAL * len(self._firsts)):
            return True
        if measured.samples != self._usual or len(self._sizes) < 2:  # counting costs 5 µs: only if it can matter
            size, count = Counter(self._sizes).most_common(1)[0]
            self._usual = size if count >= _USUAL * len(self._sizes) else None
        return self.tells_sizes and self._usual is not None and measured.samples != self._usual


class UsualBatch:
    """Know the shape of the usual batch."""

    def __init__(self) -> None:
        self.shape: Hashable = None
        """Its shape, "varying" if there is no usual one, None before the first steps."""
        self._before: Hashable = None
        """The usual shape before the batch controller changed the batch; None if it hasn't."""
        self._counts: Counter[Hashable] = Counter()
        """Of the measured steps since that was judged: an action of one step has one shape although shapes vary."""

    def judge(self, shapes: Iterable[Hashable]) -> bool:
        """Take in the shapes of measured steps; tell whether the usual one was judged anew."""
        self._counts.update(shapes)
        if self.shape is not None and self._counts.total() < _JUDGED_BY:
            return False
        shape, count = self._counts.most_common(1)[0] if self._counts else (None, 0)
        least = _STILL_USUAL if shape == self.shape else _USUAL_SHAPE
        self.shape = shape if count >= least * self._counts.total() else "varying"
        self._counts.clear()
        return True

    def forget(self, *, is_resized: bool) -> None:
        """Forget the shapes since the usual one was judged; the batch controller may have changed the batch."""
        self._counts.clear()
        if is_resized:
            self._before = self.shape

    def has_followed(self) -> bool:
        """Tell, once, that the usual shape has followed a change by the batch controller."""
        if self._before is None or self.shape in (self._before, "varying"):
            return False
        self._before = None
        return True


class WholeEpoch:
    """Book each step of the first epoch that begins within an action.

    Args:
        begun: epochs that had begun when the action began.
    """

    def __init__(self, begun: int = 0) -> None:
        self._before, self._counted = begun, 0

    def book(self, measured: Measurement, result: Result, begun: int, are_repeated: bool) -> bool:
        """Book a step if it is one of that epoch; return whether the epoch has ended before this step.

        Args:
            are_repeated: the loop repeats batches that it has kept.
        """
        if are_repeated:
            result.measurements.append(measured)
            return len(result.measurements) >= _REPEATED
        is_counting = bool(result.measurements)
        if measured.first and begun > (self._counted if is_counting else self._before):
            if is_counting:
                return True  # the loop has left the epoch before its end
            self._counted, is_counting = begun, True
        if is_counting:
            result.measurements.append(measured)
        return False


class ActionSteps:
    """The steps of the action under way: which are measured, and what they took."""

    def __init__(self) -> None:
        self.action: Action | None = None
        self.result = Result()
        self.usual, self.batch = UsualSteps(), UsualBatch()
        self.is_left_out = False
        """The present step's time is not that of others."""
        self._whole_epoch, self._moves = WholeEpoch(), 0

    @property
    def usual_batch(self) -> tuple[int, Hashable]:
        """Samples of most steps, 0 if unknown, and the shape of most batches."""
        return self.usual.size, self.batch.shape

    def begin(self, action: Action, epochs: int, moves: int) -> None:
        """Begin an action, after so many epochs have begun, and the loop has gone on to other loaders so often."""
        self.action, self.result, self._whole_epoch, self._moves = action, Result(), WholeEpoch(epochs), moves

    def forget(self, *, is_resized: bool) -> None:
        """Forget the times of the action so far; the batch controller may have changed the batch."""
        self.result.forget_steps()
        self.batch.forget(is_resized=is_resized)

    def add(self, measured: Measurement, epochs: int, moves: int, *, are_repeated: bool) -> bool:
        """Take in a step that has ended; return whether it was the action's last.

        Args:
            are_repeated: the loop repeats batches that it has kept.
        """
        action, result = self.action, self.result
        assert action is not None
        result.steps += 1
        result.elapsed_s += measured.seconds
        is_left_out, self.is_left_out = self.is_left_out, False
        if not is_left_out:
            self.usual.add(measured)
        if action.whole_epoch and moves != self._moves:  # its epoch would not end
            result.forget_steps()
            return True
        if action.whole_epoch:
            is_counted = not (are_repeated and is_left_out)
            return is_counted and self._whole_epoch.book(measured, result, epochs, are_repeated)
        if not is_left_out and not self.usual.is_odd(measured):
            is_settling = len(result.settling) < action.settle
            (result.settling if is_settling else result.measurements).append(measured)
        return len(result.measurements) >= action.steps


class Observation:
    """Observe some steps that the controller wants diagnosed: the evidence is that of `accel profile`.

    Only while it is open: a wrapper around the backward pass, DDP's own timers, the training thread's
    CPU times from the system, read when a batch is requested and delivered, and on a GPU an event at
    each mark and wrappers around copies to it. Once it is closed, steps cost nothing more.

    Args:
        clock: receives the times of the backward pass.
        number: tells the number of the step that ends.
        counts: returns whether the loop's own step is under way, and neither a rest nor a block that is not measured.
    """

    def __init__(
        self, clock: StepClock, run: Run, number: Callable[[], int], counts: Callable[[], bool] = lambda: True
    ) -> None:
        self._clock, self._run = clock, run
        self._counts, self._is_backward = counts, False
        self._ddp_wait = DdpWait()
        self._ddp_wait.sample([run.model])
        self._meter = ThreadMeter(tid=threading.get_native_id())
        self._began = self._meter.read()
        self._requested: ThreadTime | None = None
        self._waits: list[tuple[float, float, float]] = []
        self._device = DeviceSteps(clock, number, run.device, counts) if run.cuda else None
        backward.listen(self, first=True)
        if self._device is not None:
            self._device.install()
        clock.backward_is_seen = True

    def close(self) -> None:
        """Remove the wrapper and stop the timers."""
        self._ddp_wait.stop()
        if self._device is not None:
            self._device.remove()
        backward.forget(self)
        self._clock.backward_is_seen = False
        self._meter.close()

    def backward_begins(self, roots: list[Tensor]) -> None:
        """A backward pass of the loop begins."""
        self._is_backward = self._counts()
        if self._is_backward:
            self._clock.enter("backward")

    def backward_ended(self, roots: list[Tensor]) -> None:
        """It has ended."""
        if self._is_backward:
            self._clock.backwarded()

    def batch_requested(self) -> None:
        """The loop requests a batch."""
        self._ddp_wait.sample([self._run.model])
        self._requested = self._meter.read()

    def batch_delivered(self) -> None:
        """The batch is delivered."""
        now = self._meter.read()
        if self._requested is not None and now is not None:
            self._waits.append(
                (now.at - self._requested.at, now.run - self._requested.run, now.wait - self._requested.wait)
            )

    def evidence(self, steps: list[Measurement]) -> Evidence:
        """Return the evidence on these steps, which get a GPU's times; those of which it has none are left out."""
        if self._device is not None:
            self._device.apply(steps)
        run, now = self._run, self._meter.read()
        waited, seconds = self._ddp_wait.mean(), sum(step.seconds for step in steps)
        return Evidence(
            steps=steps,
            cores=run.cores,
            threads=torch.get_num_threads(),
            device=run.device.type,
            world_size=run.world_size,
            thread=self._began.share_until(now) if self._began is not None and now is not None else None,
            data_thread=self._waiting(),
            loader=facts.of_loader(run.loader),
            optimizer=facts.of_optimizers(run.optimizers),
            dtype=facts.dtype(run.model.parameters()),
            anomaly_mode=torch.is_anomaly_enabled(),
            ddp_wait_share=waited * len(steps) / seconds if waited is not None and seconds else None,
            exchanges=self._ddp_wait.exchanges(),
        )

    def _waiting(self) -> ThreadShare | None:
        wall, ran, waited = (sum(part) for part in zip(*self._waits, strict=True)) if self._waits else (0.0, 0.0, 0.0)
        return ThreadTime(0.0, 0.0, 0.0).share_until(ThreadTime(wall, ran, waited))
