"""Orders to go on with another number of ranks, and what a running job answers: small files beside its checkpoints.

order             number, ranks               by whoever holds the job
arrived-N-RANK                                by a process that was started for order N, in accel.optimize
group-N           address, port, backend      by rank 0: where the ranks of the order meet
answer-N          problem                     by rank 0: '' once they train, else why they go on as they were
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accel.files import write_atomic

VARIABLE = "ACCEL_RESIZES"
"""Names the folder of the orders, in the environment of a job that takes any."""
SEEN = "ACCEL_RESIZES_SEEN"
"""Number of the last order that was given before this process began, or was carried out in it."""
_FOLDER = "resizes"
_LOOK_S = 0.2
"""Between two looks for an order; ranks meet about once a second, and a single one would look at each step."""


class ResizeOrder(NamedTuple):
    """To go on with so many ranks."""

    number: int = 0
    """Of the orders, from 1; 0 is none."""
    ranks: int = 0


class Meeting(NamedTuple):
    """Where the ranks of an order meet."""

    address: str
    port: int
    backend: str
    """Of the process group, by device."""


class ResizeOrders:
    """The files of one job.

    Args:
        folder: of its checkpoints.
        clock: s.

    Example:
        >>> import tempfile
        >>> orders = ResizeOrders(tempfile.mkdtemp())
        >>> orders.give(ResizeOrder(1, 4))
        >>> orders.order(), orders.answer_to(1)
        (ResizeOrder(number=1, ranks=4), None)
    """

    def __init__(self, folder: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = Path(folder) / _FOLDER, clock
        self._looked = -_LOOK_S
        self._seen = ResizeOrder()

    def order(self) -> ResizeOrder:
        """Return the newest order, as of some tenths of a second ago."""
        if self._clock() - self._looked >= _LOOK_S:
            self._looked = self._clock()
            content = self._read("order")
            self._seen = ResizeOrder() if content is None else ResizeOrder(**content)
        return self._seen

    def last(self) -> int:
        """Return the number of the newest order that was ever given here; 0 if none was."""
        content = self._read("order")
        return 0 if content is None else int(content["number"])

    def give(self, order: ResizeOrder) -> None:
        """Give an order; ranks 0 take the one before back."""
        self._write("order", order._asdict())

    def arrive(self, number: int, rank: int) -> None:
        """Say that a process that was started for an order is there."""
        self._write(f"arrived-{number}-{rank}", {})

    def has_arrived(self, number: int, rank: int) -> bool:
        """Return whether a process has said so."""
        return self._path(f"arrived-{number}-{rank}").exists()

    def meet_at(self, number: int, meeting: Meeting) -> None:
        """Say where the ranks of an order meet."""
        self._write(f"group-{number}", meeting._asdict())

    def meeting_of(self, number: int) -> Meeting | None:
        """Return where that is; None while it is not known."""
        content = self._read(f"group-{number}")
        return None if content is None else Meeting(**content)

    def answer(self, number: int, problem: str) -> None:
        """Answer an order; `problem` is '' once its ranks train."""
        self._write(f"answer-{number}", {"problem": problem})

    def answer_to(self, number: int) -> str | None:
        """Return the answer; None while there is none."""
        content = self._read(f"answer-{number}")
        return None if content is None else str(content["problem"])

    def forget(self, number: int) -> None:
        """Remove what was said for an order, once it is over."""
        for path in self._folder.glob(f"*-{number}*"):
            if path.name.split("-")[1].split(".")[0] == str(number):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_atomic(self._path(name), json.dumps(content))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            content = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none, or none that can be read: as good as none
            return None
        return content if isinstance(content, dict) else None


def orders_of_job() -> ResizeOrders | None:
    """Return the orders that this process's job takes; None if it takes none."""
    folder = os.environ.get(VARIABLE)
    return ResizeOrders(folder) if folder else None
