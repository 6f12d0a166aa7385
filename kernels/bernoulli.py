"""`Tensor.bernoulli_` on a CPU with the same bits, from the same generator, in a tenth of the time.

    u = (w₂ᵢ mod 2²¹) · 2³² + w₂ᵢ₊₁        xᵢ = 1 if u < ⌈2⁵³ p⌉ else 0

w are the words of torch's Mersenne Twister. torch takes them one after the other, in one thread: 5.8 ns an element, so
that the masks of dropout took 24 % of a small vision transformer's step. Here the state is advanced and the words are
tempered and compared in vector instructions: 0.56 ns an element (AMD EPYC with AVX-512, a million elements, torch
2.13). The generator is left in the state in which torch would have left it.

    >>> plain = torch.empty(1000).bernoulli_(0.9, generator=torch.Generator().manual_seed(7))
    >>> torch.equal(bernoulli_(torch.empty(1000), 0.9, generator=torch.Generator().manual_seed(7)), plain)
    True

On an Intel processor torch may draw by MKL, from another generator; `why_not` then says so.

Source: Matsumoto and Nishimura, Mersenne Twister, ACM TOMACS 1998; torch's CPUGeneratorImpl.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from accel.kernels.draws.library import NotCompiled, compiler, library
from accel.profiler.errors import InvalidState

__all__ = ["bernoulli_", "compiler", "takes", "why_not"]

_FEW = 4096
"""Elements from which on it pays: a call takes 7 µs more than torch's."""
_WORDS = 624
# torch's state of a generator, in bytes: the seed, how many words are left, whether it was seeded, the next word, and
# the words in 64 bits each; what follows belongs to normal draws.
_LEFT, _NEXT, _STATE = 8, 16, 24
_BYTES = 5056

_ONES: dict[torch.dtype, int] = {
    torch.float32: 0x3F800000,
    torch.float64: 0x3FF0000000000000,
    torch.float16: 0x3C00,
    torch.bfloat16: 0x3F80,
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), 1),
}
_lock = threading.Lock()


def bernoulli_(tensor: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    """Fill a tensor with ones, with probability p, and zeros.

    Args:
        tensor: of any shape, dtype and layout. Where `takes` is False it is filled by torch.
        p: probability of a one, in [0, 1].
        generator: of the CPU; torch's default one if None.

    Returns:
        The tensor.

    Raises:
        InvalidState: if p is not in [0, 1]; it is torch's RuntimeError, too.
        accel.kernels.draws.library.NotCompiled: if there is no C compiler; see `why_not`.
    """
    if not 0.0 <= p <= 1.0:
        raise InvalidState(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    if not takes(tensor):
        return torchs(tensor, p, generator)
    if not _lock.acquire(blocking=False):  # nor does a process wait that was forked while another thread drew
        return torchs(tensor, p, generator)
    try:
        drawn = _drawn(tensor, p, torch.default_generator if generator is None else generator)
    finally:
        _lock.release()
    if not drawn:
        return torchs(tensor, p, generator)
    # Written through its address: autograd must hear of it, as a backward pass may need what stood there.
    torch.autograd.graph.increment_version(tensor)
    return tensor


def _drawn(tensor: Tensor, p: float, generator: Generator) -> bool:
    """Fill a tensor; return whether what stands in it are the generator's next numbers."""
    before = generator.get_state()
    after = before.clone()
    place = _Place.of(after)
    if place is None:
        return False
    position = library().accel_bernoulli(
        after.data_ptr() + _STATE,
        place.position,
        tensor.data_ptr(),
        tensor.numel(),
        tensor.element_size(),
        _ONES[tensor.dtype],
        math.ceil(p * 2**53),
    )
    place.move(position)
    # Another thread may have drawn meanwhile: its numbers must not be drawn again.
    if not torch.equal(before, generator.get_state()):
        return False
    generator.set_state(after)
    return True


def takes(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are drawn here: enough, on a CPU, of a usual dtype, in the order of memory.

    What autograd follows is torch's: it refuses a leaf, and notes that other elements have no gradient any more.
    """
    return (
        tensor.numel() >= _FEW
        and tensor.is_cpu
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and tensor.dtype in _ONES
        and (tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)))
    )


@functools.cache
def why_not() -> str:
    """Return why the draws can't be made here, '' if they can: they are, and compared with torch's."""
    try:
        library()
    except NotCompiled as error:
        return str(error)
    own, plain = Generator().manual_seed(7), Generator().manual_seed(7)
    if own.get_state().numel() != _BYTES:
        return f"this torch keeps a generator's state in {own.get_state().numel()} bytes, not in {_BYTES}"
    for dtype in _ONES:
        for p in (0.1, 0.5, 2 / 3):
            count = _FEW + 313  # ends within a block, and the next one begins there
            drawn = bernoulli_(torch.empty(count, dtype=dtype), p, generator=own)
            expected = torch.empty(count, dtype=dtype).bernoulli_(p, generator=plain)
            if not torch.equal(drawn, expected) or not torch.equal(own.get_state(), plain.get_state()):
                return f"torch draws {dtype} otherwise on this processor"
            for generator in (own, plain):
                torch.empty((), dtype=torch.int32).random_(
                    generator=generator
                )  # a single word: pairs begin at odd ones
    return ""


def torchs(tensor: Tensor, p: float, generator: Generator | None) -> Tensor:
    """Let torch draw, through the overload whose probability is a tensor: it takes the same numbers."""
    return tensor.bernoulli_(_as_tensor(p), generator=generator)


@functools.lru_cache(maxsize=64)
def _as_tensor(p: float) -> Tensor:
    return torch.tensor(p, dtype=torch.float64)


class _Place(NamedTuple):
    """Where in its block of words a generator stands; views of its state."""

    left: np.ndarray[tuple[int], np.dtype[np.int32]]
    """Words of the block that are left, and one more."""
    next: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """Number of the next word; 0 before the first block as well."""

    @classmethod
    def of(cls, state: Tensor) -> _Place | None:
        """Return the place in a state; None if it is not as torch leaves it."""
        if state.numel() != _BYTES:
            return None
        array = state.numpy()
        place = cls(array[_LEFT : _LEFT + 4].view(np.int32), array[_NEXT : _NEXT + 8].view(np.uint64))
        left, following = int(place.left[0]), int(place.next[0])
        return place if left == 1 or (1 < left <= _WORDS and left + following == _WORDS + 1) else None

    @property
    def position(self) -> int:
        """Return the number of the next word, that of words if none is left."""
        return _WORDS if self.left[0] == 1 else int(self.next[0])

    def move(self, position: int) -> None:
        """Set the number of the next word."""
        self.left[0], self.next[0] = _WORDS + 1 - position, position
