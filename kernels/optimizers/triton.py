"""The Triton kernel of the updates: every parameter of a group in one launch.

What it computes stands in rules.py, the table and the numbers of each tensor in triton_scalars.py. It is compiled
for each of four kinds:

    sgd, adam  of SGD and LARS, of Adam and AdamW
    moments    LAMB's first half: both moments, and squares of weights and updates of each chunk
    apply      LAMB's second half, when the ratio of each tensor is known

Nothing is written where `overflow` is set. Full blocks are read and written without masks, or their accesses would not
be vectors; the rest of a tensor is masked.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from accel.kernels.launching import PlannedKernel
from accel.kernels.optimizers.triton_scalars import (
    _GRAD,
    _MASTER,
    _PARAM,
    _STATE1,
    _STATE2,
    _STATE3,
    _USED,
    _number,
    _place,
    _pointer,
    _read,
    _write,
)


@triton.jit
def _momentum(b, grad, i, end, keep, take, WORK: tl.constexpr, NESTEROV: tl.constexpr, FULL: tl.constexpr):
    """Return the direction of a step of SGD with momentum, and write the buffer."""
    buffer = _read(b, i, end, WORK, FULL) * keep + grad * take
    _write(b, i, end, buffer, WORK, FULL)
    if NESTEROV:
        direction = grad + buffer * keep
    else:
        direction = buffer
    return direction


@triton.jit
def _moments(m, v, grad, i, end, keep1, take1, keep2, take2, WORK: tl.constexpr, FULL: tl.constexpr):
    """Return both moments of Adam, and write them."""
    first = _read(m, i, end, WORK, FULL) * keep1 + grad * take1
    second = _read(v, i, end, WORK, FULL) * keep2 + grad * grad * take2
    _write(m, i, end, first, WORK, FULL)
    _write(v, i, end, second, WORK, FULL)
    return first, second


@triton.jit
def _update_block(
    pointers, numbers, i, end,
    KIND: tl.constexpr, PARAM: tl.constexpr, WORK: tl.constexpr, HAS_MASTER: tl.constexpr, HAS_BUFFER: tl.constexpr,
    NESTEROV: tl.constexpr, AMSGRAD: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Update one block. `moments` returns squares of weights and updates, others nothing of use."""
    p, w, g, m, v, x = pointers
    factor, penalty, keep1, take1, keep2, take2, root, epsilon, rate, shrink, debias = numbers
    weight = _read(w, i, end, WORK, FULL)
    squares = weight * weight
    updates = squares
    if KIND == "apply":
        first = _read(m, i, end, WORK, FULL)
        second = _read(v, i, end, WORK, FULL)
    else:
        grad = _read(g, i, end, WORK, FULL) * factor + weight * penalty
        if KIND != "sgd":
            first, second = _moments(m, v, grad, i, end, keep1, take1, keep2, take2, WORK, FULL)
        elif HAS_BUFFER:
            grad = _momentum(m, grad, i, end, keep1, take1, WORK, NESTEROV, FULL)
    if KIND == "sgd":
        weight = weight - grad * rate
    elif KIND == "adam":
        if AMSGRAD:
            # Not tl.maximum, which drops NaN.
            largest = _read(x, i, end, WORK, FULL)
            second = tl.where(largest > second, largest, second)
            _write(x, i, end, second, WORK, FULL)
        weight = weight * shrink - rate * (first / (tl.sqrt(second) * root + epsilon))
    else:
        update = first * debias / (tl.sqrt(second) * root + epsilon) + weight * shrink
        if KIND == "apply":
            weight = weight - update * rate
        else:
            if not FULL:
                update = tl.where(i < end, update, 0.0)
            updates = update * update
    if KIND != "moments":
        _write(p, i, end, weight, PARAM, FULL)
        if HAS_MASTER:
            _write(w, i, end, weight, WORK, FULL)
    return squares, updates


@PlannedKernel
@triton.jit
def update_kernel(
    addresses,  # [7, T]
    layout,  # [3, T]
    work,  # [2, C]
    scalars,  # [T, 16] fp64
    overflow,  # [] fp32
    weight_squares,  # [P] fp64 for moments, or None
    update_squares,  # [P] fp64 for moments, or None
    T,
    C,
    KIND: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    WORK: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_BUFFER: tl.constexpr,  # of SGD
    NESTEROV: tl.constexpr,  # of SGD
    AMSGRAD: tl.constexpr,  # of Adam
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(overflow) == 0.0:
        tensor, row, begin, end = _place(layout, work, T, C, CHUNK)
        # What a kind does without is not read: the compiler drops loads that nothing depends on.
        p = _pointer(addresses, _PARAM, T, tensor, PARAM, ALIGNED)
        g = _pointer(addresses, _GRAD, T, tensor, GRAD, ALIGNED)
        m = _pointer(addresses, _STATE1, T, tensor, WORK, ALIGNED)
        v = _pointer(addresses, _STATE2, T, tensor, WORK, ALIGNED)
        x = _pointer(addresses, _STATE3, T, tensor, WORK, ALIGNED)
        if HAS_MASTER:
            w = _pointer(addresses, _MASTER, T, tensor, WORK, ALIGNED)
        else:
            w = p
        pointers = (p, w, g, m, v, x)
        numbers = ()
        for column in tl.static_range(_USED):
            numbers += (_number(scalars, tensor, column, WORK),)
        weights = tl.zeros([BLOCK], WORK)
        updates = tl.zeros([BLOCK], WORK)
        blocks = (end - begin) // BLOCK
        for block in range(0, blocks):
            i = begin + block * BLOCK + tl.arange(0, BLOCK)
            weight, update = _update_block(
                pointers, numbers, i, end, KIND, PARAM, WORK, HAS_MASTER, HAS_BUFFER, NESTEROV, AMSGRAD, True
            )
            if KIND == "moments":
                weights += weight
                updates += update
        if begin + blocks * BLOCK < end:
            i = begin + blocks * BLOCK + tl.arange(0, BLOCK)
            weight, update = _update_block(
                pointers, numbers, i, end, KIND, PARAM, WORK, HAS_MASTER, HAS_BUFFER, NESTEROV, AMSGRAD, False
            )
            if KIND == "moments":
                weights += weight
                updates += update
        if KIND == "moments":
            tl.store(weight_squares + row, tl.sum(weights, 0).to(tl.float64))
            tl.store(update_squares + row, tl.sum(updates, 0).to(tl.float64))
