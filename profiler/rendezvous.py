"""How ranks agree: what each brings to a meeting goes to rank 0 through a store, and rank 0's answer goes to all.

A meeting is held by all ranks or by none. Rank 0 closes it once all have come, another rank once it has waited too
long; an atomic count decides who was first, and that rank's outcome holds for all, those that come later included. No
collective can do that: a gloo group breaks for good at its first timeout, its ranks may learn of it at different steps,
and `monitored_barrier` tells rank 0 alone who was missing. Nothing but the store takes part, so neither a GPU nor the
user's groups are touched, and a failed meeting leaves no collective half open for the user's next one to trip over. A
meeting costs O(ranks) operations on the store.

A rank that is long at work on its way to a meeting, compiling say, shows that it is alive (`SignsOfLife`): a thread
counts up a number in the store. Rank 0 waits as long as the numbers of all that are missing grow, and counts up its
own, which is all that the others look at.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from accel.profiler.errors import AccelError, InvalidArgument
from accel.profiler.interruptions import ours

T = TypeVar("T")
A = TypeVar("A")

_SHORTEST_S, _LONGEST_S = 0.0005, 0.05
"""Between two looks, doubling: `wait` of a TCPStore writes to stderr when its time is up."""
_ANSWER_S = 60.0
"""What the rank that closes a meeting may take to answer."""
_SIGNS = 4.0
"""Within the patience of the others, of a rank that is at work."""
_LONGEST_WORK_S = 600.0
"""After which it is not waited for either."""
_NAMED = 8
"""Ranks that a message names."""


class RanksDiverged(AccelError, RuntimeError):
    """Ranks did not meet; the message is a sentence that says who was missing and what to do.

    Attributes:
        by: the rank that noticed it, or None if each does.
    """

    by: int | None = None


class RankLeft(RanksDiverged):
    """A rank announced that it comes to no more meetings, perhaps before the step that the others are at."""


class _Outcome(NamedTuple):
    """What closes a meeting."""

    kind: str
    """`answer`, `diverged`, `left` (a rank takes part no more) or `refused` (rank 0 raised ValueError)."""
    value: Any
    at: float = 0.0
    """Wall-clock time."""
    by: int | None = None
    """The rank that closed it."""


class Rendezvous:
    """Meetings of the same ranks, one after the other; every rank takes part in each.

    Args:
        store: of `torch.distributed`, for these meetings alone: give it a prefix.
        rank: this rank.
        size: number of ranks.
        patience_s: how long to wait for a rank that does not come.
        remedy: what to do about it, the end of a sentence.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        patience_s: float,
        remedy: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank, self.size, self.patience_s = rank, size, patience_s
        self.store, self._remedy, self._clock, self._sleep = store, remedy, clock, sleep
        self._number = 0
        self._deadline = self._arrived = 0.0
        self.life = SignsOfLife(self)
        self._is_closed = False
        """Another rank is closing the present meeting, and is about to write its outcome."""

    def meet(self, own: T, answer: Callable[[list[T]], A], missed: str, *, all_must_come: bool = True) -> A:
        """Return what rank 0 makes of what all ranks brought.

        Args:
            own: what this rank brings; pickled.
            answer: called on rank 0 with what each rank brought, by rank.
            missed: what a rank that doesn't come has not done, after "which".
            all_must_come: if False, the answer is made in any case, by whoever has waited long enough, with None for
                each rank that did not come.

        Raises:
            RanksDiverged: on every rank, if one does not come in time, has left, or `answer` fails or raises it.
            InvalidArgument: on every rank, if `answer` raises it.
        """
        self.arrive(own)
        pause_s = _SHORTEST_S
        while not (result := self.look(answer, missed, all_must_come=all_must_come)):
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        value: A = result[0]
        return value

    def arrive(self, own: Any) -> None:
        """Come to the next meeting; `look` returns its answer once it is over."""
        self._arrived = self._clock()
        self._deadline, self._is_closed = self._arrived + self.patience_s, False
        self.life.begin(self._arrived)
        with _reached():
            self.store.set(self.key(self.rank), pickle.dumps(own))

    def look(self, answer: Callable[[list[Any]], Any], missed: str, *, all_must_come: bool = True) -> tuple[Any, ...]:
        """Return rank 0's answer in a tuple, an empty one while the meeting is open; see `meet`."""
        with _reached():
            outcome = self._outcome()
            if outcome is None and not self._is_closed:
                outcome = self._close(answer, missed, all_must_come)
            if outcome is not None:
                return (self._conclude(outcome),)
        if self._is_closed and self._clock() > self._deadline:
            self._number += 1
            raise RanksDiverged(
                f"a rank closed a meeting and then said nothing for {_ANSWER_S:g} s: it has ended; see its log"
            )
        return ()

    def check(self) -> None:
        """Raise `RanksDiverged` if the others have given up a meeting that this rank has not come to yet."""
        with _reached():
            if (outcome := self._outcome()) is not None:
                self._conclude(outcome)

    def given_up_before(self, moment: float) -> bool:
        """Return whether the others gave the coming meeting up before a moment in wall-clock time."""
        with _reached():
            outcome = self._outcome()
        return outcome is not None and outcome.at < moment

    def all_came(self) -> bool:
        """Return whether all ranks have come by now to the last meeting, which was given up: they may meet again."""
        with _reached():
            return bool(self.store.check([self.key(rank, self._number - 1) for rank in range(self.size)]))

    def leave(self, why: str) -> None:
        """Announce that this rank comes to no more meetings, and why, in a sentence without its end."""
        with contextlib.suppress(RuntimeError):  # without a store there is nobody to notify
            for _ in range(2):  # the present meeting may have been closed by another rank, with an answer
                if self._claim():
                    self._publish(_Outcome("left", why))
                    return
                self._number += 1

    def _close(self, answer: Callable[[list[Any]], Any], missed: str, all_must_come: bool) -> _Outcome | None:
        """Close the meeting if all have come, or it is too late, unless another rank does."""
        posts = [self.key(rank) for rank in range(self.size)]
        complete = self.rank == 0 and self.store.check(posts)
        if not complete:
            now = self._clock()
            self.life.show(now)
            if now < self._deadline:
                return None
            if now - self._arrived < _LONGEST_WORK_S and self.life.is_shown_by_all(posts):
                self._deadline = now + self.patience_s
                return None
        if not self._claim():
            self._is_closed, self._deadline = True, self._clock() + _ANSWER_S
            return None
        missing = [] if complete else [rank for rank, key in enumerate(posts) if not self.store.check([key])]
        if not complete and all_must_come:
            waited = f"rank {self.rank} waits for {named(missing or [0])}, which {missed}"
            return self._publish(_Outcome("diverged", f"{waited} within {self.patience_s:g} s; {self._remedy}"))
        try:
            came = iter(_read_all(self.store, [key for rank, key in enumerate(posts) if rank not in missing]))
            brought = [None if rank in missing else pickle.loads(next(came)) for rank in range(self.size)]
            return self._publish(_outcome_of(answer, brought))
        except BaseException as error:  # the others wait for an outcome
            why = f"rank {self.rank} could not answer the others: {type(error).__name__}: {error}"
            self._publish(_Outcome("diverged", why))
            raise

    def _claim(self) -> bool:
        """Return whether this rank is the first to close the present meeting."""
        return bool(self.store.add(self.key("closed"), 1) == 1)

    def _publish(self, outcome: _Outcome) -> _Outcome:
        outcome = outcome._replace(at=time.time(), by=self.rank)
        self.store.set(self.key("outcome"), pickle.dumps(outcome))
        return outcome

    def _conclude(self, outcome: _Outcome) -> Any:
        if outcome.kind == "answer":
            self._forget(self._number, self.rank, _life_of(self.rank))
            if self.rank == 0 and self._number:  # all have come to this one, so all have read the outcome of the last
                self._forget(self._number - 1, "outcome", "closed")
        self._number += 1
        if outcome.kind == "refused":
            raise InvalidArgument(outcome.value)
        if outcome.kind != "answer":
            diverged = (RankLeft if outcome.kind == "left" else RanksDiverged)(outcome.value)
            diverged.by = outcome.by
            raise diverged
        return outcome.value

    def key(self, name: object, number: int | None = None) -> str:
        """Return where something of a meeting stands in the store, by default of the coming one."""
        return f"{self._number if number is None else number}/{name}"

    def _outcome(self) -> _Outcome | None:
        key = self.key("outcome")
        outcome: _Outcome | None = pickle.loads(self.store.get(key)) if self.store.check([key]) else None
        return outcome

    def _forget(self, number: int, *names: object) -> None:
        for name in names:
            with contextlib.suppress(RuntimeError):  # a store that can't delete keeps it
                self.store.delete_key(self.key(name, number))


class SignsOfLife:
    """Numbers in the store that grow while ranks are at work on their way to a meeting, and while rank 0 waits."""

    def __init__(self, meetings: Rendezvous) -> None:
        self._meetings, self._store = meetings, meetings.store
        self._shown_at = 0.0
        self._known: dict[int, int] = {}
        """As last looked at in the present meeting."""

    def begin(self, now: float) -> None:
        """Begin a meeting."""
        self._shown_at, self._known = now, {}

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Have the others wait for this rank at the coming meeting as long as the block lasts, ten minutes at most."""
        has_ended, pause_s = threading.Event(), self._meetings.patience_s / _SIGNS

        def show() -> None:
            with contextlib.suppress(RuntimeError):  # without a store there is nobody to notify
                while not has_ended.wait(pause_s):
                    self._grow(self._meetings.rank, 1)

        thread = threading.Thread(target=show, name="accel-at-work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    def show(self, now: float) -> None:
        """Show, on rank 0, that it waits; the others look at nobody else."""
        if self._meetings.rank == 0 and now - self._shown_at > self._meetings.patience_s / _SIGNS:
            self._shown_at = now
            self._grow(0, 1)

    def is_shown_by_all(self, posts: Sequence[str]) -> bool:
        """Tell whether all of whom no post is in the store have been alive since the last look."""
        waits_for = [0] if self._meetings.rank else [r for r, key in enumerate(posts) if not self._store.check([key])]
        before, self._known = self._known, {rank: self._grow(rank, 0) for rank in waits_for}
        return all(count > before.get(rank, 0) for rank, count in self._known.items())

    def _grow(self, rank: int, by: int) -> int:
        return int(self._store.add(self._meetings.key(_life_of(rank)), by))


def _life_of(rank: int) -> str:
    return f"{rank}/at work"


def _outcome_of(answer: Callable[[list[Any]], Any], brought: list[Any]) -> _Outcome:
    try:
        return _Outcome("answer", answer(brought))
    except ValueError as error:
        return _Outcome("refused", str(error))
    except RanksDiverged as error:
        return _Outcome("diverged", str(error))
    except ours() as error:
        return _Outcome("diverged", f"rank 0 failed to answer the others: {type(error).__name__}: {error}")


def _read_all(store: Any, keys: Sequence[str]) -> list[bytes]:
    return list(store.multi_get(keys)) if store.has_extended_api() else [store.get(key) for key in keys]


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Raise the errors of a store that can't be reached, which are of several kinds, as `RanksDiverged`."""
    try:
        yield
    except RanksDiverged:
        raise
    except ours(RuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise RanksDiverged(
            f"the store of the process group can't be reached: {first}; the process that holds it has ended"
        ) from None


def named(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    Example:
        >>> named([1]), named([1, 4, 5])
        ('rank 1', 'each of rank 1, rank 4, rank 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"each of {', '.join(f'rank {rank}' for rank in ranks[:_NAMED])}{more}"
