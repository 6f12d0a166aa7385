"""Triton kernels before the update: the table of addresses, norms, and the numbers of each tensor.

What they compute stands in rules.py. Shapes: T tensors, G parameter groups, P chunks of `CHUNK` elements of all
tensors, C of them in one launch, which are those of one pair of dtypes.

    addresses  [7, T] int64: parameter, three states, master weights, step counter (0 where there is none), gradient
    layout     [3, T] int64: elements, first chunk, parameter group
    work       [2, C] int32: the tensor of each program, and which of its chunks

    sums       squares of gradients (and weights) of each chunk, and whether all are finite
    scalars    the norm of all gradients, the step counters, and a row of numbers for each tensor
    ratio      the trust ratio of each tensor of LARS or LAMB

Sums have one order: the same bits in every run. Nothing is written where `overflow` is set.
"""

# Triton's language has no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from accel.kernels.launching import PlannedKernel
from accel.kernels.optimizers.rules import COLUMNS

_COLUMNS = _SCALARS = tl.constexpr(COLUMNS)
# Columns of `hypers`, those of `Hypers` in order.
_LR, _BETA1, _BETA2, _EPS, _WEIGHT_DECAY, _MAX_NORM, _TRUST, _SIGN = map(tl.constexpr, range(8))
_DECOUPLED, _BIAS_CORRECTION, _GRAD_AVERAGING, _ALWAYS_ADAPT, _TRUST_CLIP, _LR_IN_MOMENTUM = map(
    tl.constexpr, range(8, 14)
)
# Rows of `addresses` and of `layout`.
_PARAM, _STATE1, _STATE2, _STATE3, _MASTER, _STEP, _GRAD = map(tl.constexpr, range(7))
_NUMEL, _FIRST, _GROUP = map(tl.constexpr, range(3))
# Columns of `scalars`: what of the hyperparameters, the step and the norm goes into the elements of a tensor.
_FACTOR = tl.constexpr(0)  # of the gradient: sign, loss scale, clipping
_PENALTY = tl.constexpr(1)  # times the weight, added to the gradient
_KEEP1, _TAKE1, _KEEP2, _TAKE2, _ROOT, _EPSILON = map(tl.constexpr, range(2, 8))
_RATE = tl.constexpr(8)  # of what is subtracted from the weight
_SHRINK = tl.constexpr(9)  # Adam: what remains of the weight. LAMB: what of the weight is added to the update
_DEBIAS = tl.constexpr(10)
_USED = tl.constexpr(11)


@triton.jit
def _pointer(addresses, row: tl.constexpr, T, tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + row * T + tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _place(layout, work, T, C, CHUNK: tl.constexpr):
    """Return the tensor of this program, its row of chunks, where its elements begin, and where they end."""
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(work + program).to(tl.int64)
    chunk = tl.load(work + C + program).to(tl.int64)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, tl.load(layout + _NUMEL * T + tensor))
    return tensor, tl.load(layout + _FIRST * T + tensor) + chunk, begin, end


@triton.jit
def _read(pointer, i, end, WORK: tl.constexpr, FULL: tl.constexpr):
    if FULL:
        x = tl.load(pointer + i)
    else:
        x = tl.load(pointer + i, mask=i < end, other=0.0)
    return x.to(WORK)


@triton.jit
def _write(pointer, i, end, x, DTYPE: tl.constexpr, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + i, x.to(DTYPE))
    else:
        tl.store(pointer + i, x.to(DTYPE), mask=i < end)


@triton.jit
def _number(scalars, tensor, column: tl.constexpr, WORK: tl.constexpr):
    return tl.load(scalars + tensor * _SCALARS + column).to(WORK)


# The norm of gradients, and what is made of it for each tensor.


@triton.jit
def _sums_block(g, w, i, end, inverse, WEIGHTS: tl.constexpr, WORK: tl.constexpr, FULL: tl.constexpr):
    grad = _read(g, i, end, WORK, FULL)
    infinite = tl.where(tl.abs(grad) < float("inf"), 0, 1)
    grad = grad * inverse
    if WEIGHTS:
        weight = _read(w, i, end, WORK, FULL)
        squares = weight * weight
    else:
        squares = grad
    return grad * grad, squares, infinite


@PlannedKernel
@triton.jit
def sums_kernel(
    addresses,  # [7, T]
    layout,  # [3, T]
    work,  # [2, C]
    grad_scale,  # [1] fp32, or None
    grad_squares,  # [P] fp64
    weight_squares,  # [P] fp64, or None
    infinite,  # [P] int32
    T,
    C,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    WORK: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, row, begin, end = _place(layout, work, T, C, CHUNK)
    g = _pointer(addresses, _GRAD, T, tensor, GRAD, ALIGNED)
    if HAS_MASTER:
        w = _pointer(addresses, _MASTER, T, tensor, WORK, ALIGNED)
    else:
        w = _pointer(addresses, _PARAM, T, tensor, PARAM, ALIGNED)
    inverse = tl.full([], 1.0, WORK)
    if grad_scale is not None:
        inverse = (1.0 / tl.load(grad_scale).to(tl.float64)).to(WORK)
    WEIGHTS: tl.constexpr = weight_squares is not None
    total_g = tl.zeros([BLOCK], WORK)
    total_w = tl.zeros([BLOCK], WORK)
    bad = tl.zeros([BLOCK], tl.int32)
    blocks = (end - begin) // BLOCK
    for block in range(0, blocks):
        i = begin + block * BLOCK + tl.arange(0, BLOCK)
        squares, others, where = _sums_block(g, w, i, end, inverse, WEIGHTS, WORK, True)
        total_g += squares
        total_w += others
        bad |= where
    if begin + blocks * BLOCK < end:
        i = begin + blocks * BLOCK + tl.arange(0, BLOCK)
        squares, others, where = _sums_block(g, w, i, end, inverse, WEIGHTS, WORK, False)
        total_g += squares
        total_w += others
        bad |= where
    tl.store(grad_squares + row, tl.sum(total_g, 0).to(tl.float64))
    tl.store(infinite + row, tl.max(bad, 0))
    if WEIGHTS:
        tl.store(weight_squares + row, tl.sum(total_w, 0).to(tl.float64))


@triton.jit
def _total(values, begin, end, BLOCK: tl.constexpr):
    """Return the sum of values[begin:end], always in the same order."""
    total = tl.zeros([BLOCK], tl.float64)
    for block in range(0, (end - begin + BLOCK - 1) // BLOCK):
        i = begin + block * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(values + i, mask=i < end, other=0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _power(base, exponent):
    """Return base ** exponent for whole exponents, in float64: a step in float32 holds 24 digits at most."""
    result = tl.zeros_like(base) + 1.0
    for _ in range(0, 25):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit
def _hyper(hypers, group, column: tl.constexpr, ok):
    return tl.load(hypers + group * _COLUMNS + column, mask=ok, other=0.0)


@triton.jit
def _store_scalar(scalars, t, column: tl.constexpr, value, ok):
    tl.store(scalars + t * _SCALARS + column, value, mask=ok)


@PlannedKernel
@triton.jit
def scalars_kernel(
    addresses,  # [7, T]
    layout,  # [3, T]
    hypers,  # [G, 16] fp64
    grad_scale,  # [1] fp32, or None
    found_inf,  # [1] fp32, or None
    grad_squares,  # [P] fp64, or None
    infinite,  # [P] int32, or None
    scalars,  # [T, 16] fp64
    norm,  # [] fp32
    overflow,  # [] fp32
    T,
    P,
    ADAPTIVE: tl.constexpr,  # Adam and LAMB, not SGD and LARS
    LAYERWISE: tl.constexpr,  # LAMB and LARS
    CHECKS: tl.constexpr,  # infinity and NaN skip the step
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = t < T
    length = tl.full([], 0.0, tl.float64)
    skips = tl.full([], 0.0, tl.float32)
    if grad_squares is not None:
        length = tl.sqrt(_total(grad_squares, 0, P, 1024))
    if found_inf is not None:
        skips = tl.where(tl.load(found_inf) == 0.0, 0.0, 1.0)
    if CHECKS:
        skips = tl.where(_total(infinite, 0, P, 1024) == 0.0, skips, 1.0)
    if tl.program_id(0) == 0:
        tl.store(norm, length.to(tl.float32))
        tl.store(overflow, skips)
    if skips == 0.0:
        group = tl.load(layout + _GROUP * T + t, mask=ok, other=0)
        counter = tl.load(addresses + _STEP * T + t, mask=ok, other=0)
        counts = ok & (counter != 0)
        steps = counter.to(tl.pointer_type(tl.float32))
        step = tl.load(steps, mask=counts, other=0.0) + 1.0
        tl.store(steps, step, mask=counts)

        lr = _hyper(hypers, group, _LR, ok)
        decay = _hyper(hypers, group, _WEIGHT_DECAY, ok)
        factor = _hyper(hypers, group, _SIGN, ok)
        if grad_squares is not None:
            most = _hyper(hypers, group, _MAX_NORM, ok)
            clip = most / (length + 1e-6)
            clip = tl.where(clip >= 1.0, 1.0, clip)  # NaN stays, as torch's clip_grad_norm_ leaves it
            factor = factor * tl.where(most < float("inf"), clip, 1.0)
        if grad_scale is not None:
            factor = factor / tl.load(grad_scale).to(tl.float64)
        keep1 = _hyper(hypers, group, _BETA1, ok)
        keep2 = _hyper(hypers, group, _BETA2, ok)
        if ADAPTIVE:
            averages = _hyper(hypers, group, _GRAD_AVERAGING, ok)
            decoupled = _hyper(hypers, group, _DECOUPLED, ok)
            corrects = _hyper(hypers, group, _BIAS_CORRECTION, ok)
            whole = step.to(tl.int64)
            debias = tl.where(corrects != 0.0, 1.0 / (1.0 - _power(keep1, whole)), 1.0)
            root = tl.where(corrects != 0.0, 1.0 / tl.sqrt(1.0 - _power(keep2, whole)), 1.0)
            _store_scalar(scalars, t, _TAKE1, tl.where(averages != 0.0, 1.0 - keep1, 1.0), ok)
            _store_scalar(scalars, t, _KEEP2, keep2, ok)
            _store_scalar(scalars, t, _TAKE2, 1.0 - keep2, ok)
            _store_scalar(scalars, t, _ROOT, root, ok)
            _store_scalar(scalars, t, _EPSILON, _hyper(hypers, group, _EPS, ok), ok)
            _store_scalar(scalars, t, _DEBIAS, debias, ok)
            _store_scalar(scalars, t, _PENALTY, tl.where(decoupled != 0.0, 0.0, decay), ok)
            if LAYERWISE:
                _store_scalar(scalars, t, _SHRINK, tl.where(decoupled != 0.0, decay, 0.0), ok)
                _store_scalar(scalars, t, _RATE, lr, ok)
            else:
                _store_scalar(scalars, t, _SHRINK, tl.where(decoupled != 0.0, 1.0 - lr * decay, 1.0), ok)
                _store_scalar(scalars, t, _RATE, lr * debias, ok)
        else:
            # keep2 is the dampening, which spares the first step.
            first = (counter != 0) & (step == 1.0)
            _store_scalar(scalars, t, _TAKE1, tl.where(first, 1.0, 1.0 - keep2), ok)
            keep1 = tl.where(first & (keep2 != 0.0), 0.0, keep1)
            _store_scalar(scalars, t, _PENALTY, decay, ok)
            _store_scalar(scalars, t, _RATE, lr, ok)
        _store_scalar(scalars, t, _KEEP1, keep1, ok)
        _store_scalar(scalars, t, _FACTOR, factor, ok)


@PlannedKernel
@triton.jit
def ratio_kernel(
    layout,  # [3, T]
    hypers,  # [G, 16] fp64
    first_squares,  # [P] fp64: of weights
    second_squares,  # [P] fp64: of updates (LAMB), or of unscaled gradients (LARS)
    grad_scale,  # [1] fp32, or None; of LARS
    scalars,  # [T, 16] fp64
    overflow,  # [] fp32
    T,
    ADAPTIVE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    if tl.load(overflow) == 0.0:
        tensor = tl.program_id(0).to(tl.int64)
        begin = tl.load(layout + _FIRST * T + tensor)
        end = begin + (tl.load(layout + _NUMEL * T + tensor) + CHUNK - 1) // CHUNK
        row = hypers + tl.load(layout + _GROUP * T + tensor) * _COLUMNS
        own = scalars + tensor * _SCALARS
        weights = tl.sqrt(_total(first_squares, begin, end, 128))
        others = tl.sqrt(_total(second_squares, begin, end, 128))
        decay = tl.load(row + _WEIGHT_DECAY)
        always = tl.load(row + _ALWAYS_ADAPT)
        lr = tl.load(row + _LR)
        if ADAPTIVE:
            adapts = ((always != 0.0) | (decay != 0.0)) & (weights > 0.0) & (others > 0.0)
            ratio = tl.where(adapts, weights / tl.where(adapts, others, 1.0), 1.0)
            tl.store(own + _RATE, lr * ratio)
        else:
            factor = tl.load(own + _FACTOR)
            clip = tl.abs(factor)
            if grad_scale is not None:
                clip = clip * tl.load(grad_scale).to(tl.float64)
            others = others * clip
            adapts = ((always != 0.0) | (decay != 0.0)) & (weights > 0.0) & (others > 0.0)
            below = tl.where(adapts, others + decay * weights + tl.load(row + _EPS), 1.0)
            ratio = tl.where(adapts, tl.load(row + _TRUST) * weights / below, 1.0)
            # min(ratio / lr, 1), without a division by a rate of 0
            clipped = tl.where(ratio < lr, ratio / tl.where(lr == 0.0, 1.0, lr), 1.0)
            ratio = tl.where(adapts & (tl.load(row + _TRUST_CLIP) != 0.0), clipped, ratio)
            inside = tl.load(row + _LR_IN_MOMENTUM)
            ratio = tl.where(inside != 0.0, ratio * lr, ratio)
            tl.store(own + _FACTOR, factor * ratio)
            tl.store(own + _PENALTY, decay * ratio)
            tl.store(own + _RATE, tl.where(inside != 0.0, 1.0, lr))
