"""A setting of the whole process that strategies of several models switch, each of them on and off by itself.

The runs of a GAN's two models, or of the folds of a cross validation, know nothing of each other. If each put back what
it found, the first to leave would take the setting away from the others, and the last would leave another one's behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from accel.run import Run
from accel.strategies.base import Strategy

T = TypeVar("T")


class ProcessSetting(Generic[T]):
    """What each user wants of a setting: the last to come has its way, and the last to leave puts it back.

    Args:
        read: returns what is set.
        write: sets it.

    Example:
        >>> level = [0]
        >>> setting = ProcessSetting(lambda: level[0], lambda value: level.__setitem__(0, value))
        >>> setting.use("first", 1)
        >>> setting.use("second", 2)
        >>> setting.leave("first")
        >>> level
        [2]
        >>> setting.leave("second")
        >>> level
        [0]
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None]) -> None:
        self._read, self._write = read, write
        self._wanted: dict[object, T] = {}
        self._before: list[T] = []
        """What was set before the first user; empty while there is none."""
        self._written: list[T] = []
        """What was read after the last write; empty if that has not come to its end."""
        self._lock = threading.Lock()

    def use(self, user: object, value: T) -> None:
        """Set it for a user, until it leaves or another one comes."""
        with self._lock:
            if not self._before:
                self._before.append(self._read())
            self._wanted.pop(user, None)
            self._wanted[user] = value
            self._set(value)

    def leave(self, user: object) -> None:
        """Set what the last of the others wants, or what was set before the first; who is no user changes nothing.

        What somebody else has set meanwhile stays.
        """
        with self._lock:
            if user not in self._wanted:
                return
            had_its_way = next(reversed(self._wanted)) is user
            del self._wanted[user]
            if self._wanted:
                if had_its_way and self._is_ours():
                    self._set(next(reversed(self._wanted.values())))
                return
            before = self._before.pop()
            if self._is_ours():
                self._write(before)

    def _set(self, value: T) -> None:
        self._written.clear()
        self._write(value)
        self._written.append(self._read())

    def _is_ours(self) -> bool:
        return not self._written or self._written == [self._read()]  # writing it may have been interrupted

    def displaced(self) -> T:
        """Return what is set without its users: what was before the first of them, or is now."""
        with self._lock:
            return self._before[0] if self._before else self._read()

    def is_used(self) -> bool:
        """Return whether it has a user."""
        return bool(self._wanted)

    def is_used_beside(self, user: object) -> bool:
        """Return whether another one uses it."""
        return any(other is not user for other in self._wanted)


class ProcessSwitch(Strategy):
    """A strategy that switches one setting of the whole process on."""

    switch: ClassVar[ProcessSetting[bool]]

    def enable(self, run: Run, setting: Any) -> None:
        """Switch it on."""
        self.switch.use(self, True)

    def disable(self, run: Run) -> None:
        """Switch it off again, unless another model wants it."""
        self.switch.leave(self)
