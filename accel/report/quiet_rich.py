"""The parts of rich that reports use, imported without changing the user's random numbers.

`rich.style` draws 24 bits from Python's `random` when it is imported, which would change the next draws of a training
run. While rich is imported here, this thread, and no other, draws from a separate generator.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _apart() -> Iterator[None]:
    own, apart = random.getrandbits, random.Random().getrandbits
    here: int | None = threading.get_ident()

    def getrandbits(k: int) -> int:
        return (apart if threading.get_ident() == here else own)(k)

    random.getrandbits = getrandbits
    try:
        yield
    finally:
        random.getrandbits, here = own, None


with _apart():
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["Console", "Table", "Text", "cell_len"]
