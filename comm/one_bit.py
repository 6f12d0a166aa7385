"""The sign of each element, one scale per block.

    x ≈ s · sign(x),  s = mean |x| over the block

which is the nearest of all s · sign(x). It needs error feedback: without, what a step loses is lost for good.
Bytes: 1/8 + 4/block per element. `accel.kernels.sign_pack` does the work.

Sources: 1-bit SGD (Seide et al. 2014); signSGD with error feedback (Karimireddy et al. 2019, arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

from typing import ClassVar

from accel.comm.compression.coarse_blocks import CoarseBlockCompressor
from accel.kernels import sign_pack
from accel.kernels.codes.block_code import BlockCode


class OneBit(CoarseBlockCompressor):
    """Send the sign of each element and the mean magnitude of each block, with error feedback.

    Args:
        block: elements that share a scale, a multiple of 8, default 256. Fewer are more accurate and cost 4/block bytes
            more.
        exact_below: parameters of fewer elements, and all of less than two dimensions, are sent as they are; default
            1024.
        start_step: steps at first, ≥ 0, that send gradients as they are, default 0. While gradients change fast, their
            signs mislead: a fifth of the training is usual.
        momentum: accumulate SGD's momentum here, default False: two more copies of the gradients, and several times
            more accurate. Hand it over before the first step: `accel.comm.sgd_momentum.take_momentum`.

    Raises:
        ValueError: if an argument is out of range; from `loss.backward()`, if momentum was not handed over.

    Example:
        >>> state = CommState(ddp, OneBit(momentum=True, start_step=1000))
        >>> ddp.register_comm_hook(state, hook)
        >>> momentum = take_momentum(state, optimizer)
    """

    feedback = True
    code: ClassVar[BlockCode] = sign_pack.CODE

    def __init__(
        self, block: int = 256, *, exact_below: int = 1024, start_step: int = 0, momentum: bool = False
    ) -> None:
        if block < 8 or block % 8 or block > 1 << 16:
            raise ValueError(f"block must be a multiple of 8 from 8 to 65,536 elements, got {block}")
        for name, value in (("exact_below", exact_below), ("start_step", start_step)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number ≥ 0, got {value!r}")
        self.block, self.exact_below, self.start_step, self.momentum = block, exact_below, start_step, momentum
        self._bind(None)
