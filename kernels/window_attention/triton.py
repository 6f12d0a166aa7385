# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The kernels of window attention: one launch forward, one backward, and a small one for the bias table's gradient.

Those here are for windows that are one block of rows, as 7 x 7 and 8 x 8 tokens are; blocks_triton.py has the others. A
program owns one head and takes every P-th window. N tokens are padded to a tile of NP columns and BM = NP rows. Token t
of window w lies in row (b·Y + y)·X + x of the map, with the roll in y and x: so nothing is ever cut out.

    S = scale · q kᵀ + bias + mask    P = softmax(S)    out = P v
    dv = Pᵀ do    dP = do vᵀ    dS = P ∘ (dP − rowsum(P ∘ dP))    dq = scale · dS k    dk = scale · dSᵀ q

A whole row fits one tile, so P is computed again in the backward pass and neither the output nor the softmax's sums are
kept. log2(e) is multiplied into scale, bias and mask, so exp2 takes the place of exp, and keys outside the window have
a bias of -inf. Which window is next is counted, not divided for: there are four integer divisions in it. The bias
gradient is summed over windows by the program in registers, written to [P, H, N, N] and reduced in fixed order: the
same bits in every run on one kind of device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accel.kernels.launching import PlannedKernel

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _map_rows(w, t, Y, X, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, WIDE: tl.constexpr):
    """Return the rows of the map in which the tokens `t` of window `w` lie."""
    image, down, right = _place(w, Y, X, WH, WW)
    return _rows_at(image, down, right, t, Y, X, WH, WW, SH, SW, WIDE)


@triton.jit
def _place(w, Y, X, WH: tl.constexpr, WW: tl.constexpr):
    """Return the image of window `w`, and how many windows are above and left of it."""
    across = X // WW
    per_image = across * (Y // WH)
    inside = w % per_image
    return w // per_image, inside // across, inside % across


@triton.jit
def _moved(place, by, Y, X, WH: tl.constexpr, WW: tl.constexpr):
    """Return the place that lies as many windows after one as `by`, the place of that number, does after the first."""
    image, down, right = place
    by_image, by_down, by_right = by
    across, tall = X // WW, Y // WH
    right += by_right
    wraps = right >= across
    right = tl.where(wraps, right - across, right)
    down += by_down + wraps.to(tl.int32)
    leaves = down >= tall
    return image + by_image + leaves.to(tl.int32), tl.where(leaves, down - tall, down), right


@triton.jit
def _is_edge(down, right, Y, X, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr):
    """Return whether a window of a rolled map may hold patches that were not neighbours; True if the map isn't rolled.

    Then regions were given, and any window may have several.
    """
    if SH + SW == 0:
        return True
    else:
        return ((down == Y // WH - 1) & (SH > 0)) | ((right == X // WW - 1) & (SW > 0))


@triton.jit
def _after(number, by, most):
    """Return (number + by) mod most, of numbers below."""
    number += by
    return tl.where(number >= most, number - most, number)


@triton.jit
def _rows_at(
    image, down, right, t, Y, X,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the rows of the map in which the tokens `t` of the window at a place lie."""
    y = down * WH + t // WW + SH
    x = right * WW + t % WW + SW
    y = tl.where(y >= Y, y - Y, y)
    x = tl.where(x >= X, x - X, x)
    if WIDE:
        image = image.to(tl.int64)
    return (image * Y + y) * X + x


@triton.jit
def _log2_bias(table, h, i, j, H: tl.constexpr, N: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr):
    """Return log2(e) · bias of queries `i` and keys `j`, which broadcast; -inf for keys outside the window."""
    down = i // WW - j // WW + WH - 1
    right = i % WW - j % WW + WW - 1
    inside = (i < N) & (j < N)
    entry = tl.where(inside, down * (2 * WW - 1) + right, 0)
    bias = tl.load(table + entry * H + h, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside | (i >= N) & (j < N), bias * _LOG2E, float("-inf"))


@triton.jit
def _normalised(x):
    """Return the rows in fp32 divided by their norms, and one over the norms."""
    x = x.to(tl.float32)
    inverse = 1.0 / tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)
    return x * inverse[:, None], inverse


@triton.jit
def _weights(
    q, k, bias, scale, regions, region, is_edge, i, j,
    N: tl.constexpr, MASKED: tl.constexpr, LOG2_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return exp(S − its row's maximum) in fp32, and one over the sums of rows.

    Columns outside the window are 0. `bias` and `scale` are multiplied by log2(e).
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION).to(tl.float32) * scale + bias
    if MASKED:  # noqa: SIM102 (known when it is compiled; without it regions are None)
        if is_edge:
            here = regions + region * N
            # Rows outside the window see keys too: with a mask of -inf they were NaN, which reached dk, dv and dscale.
            mine = tl.load(here + tl.where(i < N, i, 0)).to(tl.int32)
            theirs = tl.load(here + j, mask=j < N, other=0).to(tl.int32)
            scores += tl.where(mine[:, None] == theirs[None, :], 0.0, LOG2_MASK)
    scores = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return scores, 1.0 / tl.sum(scores, 1)


@triton.jit
def _kept(seed, w, h, pair, H: tl.constexpr, DROPOUT: tl.constexpr):
    """Return 1 ÷ (1 − dropout) where a weight is kept, else 0; by the number of its pair of tokens, so in any pass.

    Philox keys each window and head; within, two rounds of a 32-bit mixer. Philox for every weight needs 128 registers
    more, which spill.
    """
    one, two, _, _ = tl.randint4x(tl.load(seed), w * H + h)
    x = pair.to(tl.uint32) * 0x9E3779B9 + one.to(tl.uint32)
    x = _mixed(_mixed(x) ^ two.to(tl.uint32))
    return tl.where((x >> 8).to(tl.float32) >= DROPOUT * 16777216.0, 1.0 / (1.0 - DROPOUT), 0.0)


@triton.jit
def _mixed(x):
    """Mix 32 bits so that each depends on all."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@PlannedKernel
@triton.jit
def _fwd_kernel(
    qkv,  # [B·Y·X, 3, H, D]
    table,  # [T, H]
    head_scale,  # [H], cosine attention only
    regions,  # [n_regions, N] uint8, masked only
    seed,  # [1] int64, dropout only
    out,  # [B·Y·X, H, D]
    windows, n_regions, Y, X,
    SCALE: tl.constexpr, LOG2_MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WH * WW
    first, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BM)
    j = tl.arange(0, NP)
    d = tl.arange(0, DP)
    bias = _log2_bias(table, h, i[:, None], j[None, :], H, N, WH, WW)
    scale = SCALE * _LOG2E
    if COSINE:
        scale = tl.load(head_scale + h).to(tl.float32) * _LOG2E
    own = (i < N)[:, None] & (d < D)[None, :]
    every = (j < N)[:, None] & (d < D)[None, :]
    step = tl.num_programs(0)
    place, by = _place(first, Y, X, WH, WW), _place(step, Y, X, WH, WW)
    region, region_by = first % n_regions, step % n_regions
    for w in range(first, windows, step):
        rows = _rows_at(place[0], place[1], place[2], i, Y, X, WH, WW, SH, SW, WIDE)
        columns = _rows_at(place[0], place[1], place[2], j, Y, X, WH, WW, SH, SW, WIDE)
        q = tl.load(qkv + (rows * 3 * H + h)[:, None] * D + d[None, :], mask=own, other=0.0)
        k = tl.load(qkv + (columns * 3 * H + H + h)[:, None] * D + d[None, :], mask=every, other=0.0)
        v = tl.load(qkv + (columns * 3 * H + 2 * H + h)[:, None] * D + d[None, :], mask=every, other=0.0)
        if COSINE:
            q_unit, _ = _normalised(q)
            k_unit, _ = _normalised(k)
            q, k = q_unit.to(v.dtype), k_unit.to(v.dtype)
        is_edge = _is_edge(place[1], place[2], Y, X, WH, WW, SH, SW)
        p, inverse = _weights(q, k, bias, scale, regions, region, is_edge, i, j, N, MASKED, LOG2_MASK, PRECISION)
        if DROPOUT > 0:
            p *= _kept(seed, w, h, i[:, None] * NP + j[None, :], H, DROPOUT)
        o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * inverse[:, None]
        place, region = _moved(place, by, Y, X, WH, WW), _after(region, region_by, n_regions)
        tl.store(out + (rows * H + h)[:, None] * D + d[None, :], o.to(out.dtype.element_ty), mask=own)


@PlannedKernel
@triton.jit
def _bwd_kernel(
    qkv,  # [B·Y·X, 3, H, D]
    table,  # [T, H]
    head_scale,  # [H], cosine attention only
    regions,  # [n_regions, N] uint8, masked only
    seed,  # [1] int64, dropout only
    dout,  # [B·Y·X, H, D]
    dqkv,  # [B·Y·X, 3, H, D]
    dbias,  # [P, H, N, N] fp32
    dscale,  # [P, H] fp32, cosine attention only
    windows, n_regions, Y, X,
    SCALE: tl.constexpr, LOG2_MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WH * WW
    first, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BM)
    j = tl.arange(0, NP)
    d = tl.arange(0, DP)
    own = (i < N)[:, None] & (d < D)[None, :]
    every = (j < N)[:, None] & (d < D)[None, :]
    scale = SCALE
    if COSINE:
        scale = tl.load(head_scale + h).to(tl.float32)
    summed_scale = 0.0
    bias = _log2_bias(table, h, i[:, None], j[None, :], H, N, WH, WW)
    summed = tl.zeros((BM, NP), tl.float32)
    step = tl.num_programs(0)
    place, by = _place(first, Y, X, WH, WW), _place(step, Y, X, WH, WW)
    region, region_by = first % n_regions, step % n_regions
    for w in range(first, windows, step):
        columns = _rows_at(place[0], place[1], place[2], j, Y, X, WH, WW, SH, SW, WIDE)
        at_k = (columns * 3 * H + H + h)[:, None] * D + d[None, :]
        at_v = at_k + H * D
        k = tl.load(qkv + at_k, mask=every, other=0.0)
        v = tl.load(qkv + at_v, mask=every, other=0.0)
        if COSINE:
            k, k_inverse = _normalised(k)
            k = k.to(v.dtype)
        rows = _rows_at(place[0], place[1], place[2], i, Y, X, WH, WW, SH, SW, WIDE)
        at_q = (rows * 3 * H + h)[:, None] * D + d[None, :]
        q = tl.load(qkv + at_q, mask=own, other=0.0)
        do = tl.load(dout + (rows * H + h)[:, None] * D + d[None, :], mask=own, other=0.0)
        if COSINE:
            q, q_inverse = _normalised(q)
            q = q.to(v.dtype)
        is_edge = _is_edge(place[1], place[2], Y, X, WH, WW, SH, SW)
        log2_scale = scale * _LOG2E
        p, inverse = _weights(q, k, bias, log2_scale, regions, region, is_edge, i, j, N, MASKED, LOG2_MASK, PRECISION)
        p *= inverse[:, None]
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        weights = p
        if DROPOUT > 0:
            kept = _kept(seed, w, h, i[:, None] * NP + j[None, :], H, DROPOUT)
            dp *= kept
            weights = p * kept
        dv = tl.dot(tl.trans(weights.to(v.dtype)), do, input_precision=PRECISION)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        summed += ds
        ds = ds.to(v.dtype)
        dq = tl.dot(ds, k, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
        if COSINE:
            q_unit = q.to(tl.float32)
            along = tl.sum(dq * q_unit, 1)
            summed_scale += tl.sum(along)
            dq = (dq - q_unit * along[:, None]) * q_inverse[:, None]
        tl.store(dqkv + at_q, (dq * scale).to(dqkv.dtype.element_ty), mask=own)
        place, region = _moved(place, by, Y, X, WH, WW), _after(region, region_by, n_regions)
        if COSINE:
            k_unit = k.to(tl.float32)
            dk = (dk - k_unit * tl.sum(dk * k_unit, 1)[:, None]) * k_inverse[:, None]
        tl.store(dqkv + at_k, (dk * scale).to(dqkv.dtype.element_ty), mask=every)
        tl.store(dqkv + at_v, dv.to(dqkv.dtype.element_ty), mask=every)
    partial = dbias + (first * H + h).to(tl.int64) * N * N
    inside = (i < N)[:, None] & (j < N)[None, :]
    tl.store(partial + i[:, None] * N + j[None, :], summed, mask=inside)
    if COSINE:
        tl.store(dscale + first * H + h, summed_scale)


@PlannedKernel
@triton.jit
def _table_kernel(
    dbias,  # [P, H, N, N] fp32
    dtable,  # [T, H]
    programs,
    H: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, NP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of one entry of the table: over programs, and over the pairs of tokens so far apart."""
    N: tl.constexpr = WH * WW
    entry, h = tl.program_id(0), tl.program_id(1)
    down, right = entry // (2 * WW - 1) - (WH - 1), entry % (2 * WW - 1) - (WW - 1)
    i = tl.arange(0, NP)
    y, x = i // WW - down, i % WW - right
    inside = (i < N) & (y >= 0) & (y < WH) & (x >= 0) & (x < WW)
    pair = tl.where(inside, i * N + y * WW + x, 0)
    total = tl.zeros((BP, NP), tl.float32)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        at = dbias + (p * H + h).to(tl.int64)[:, None] * N * N + pair[None, :]
        total += tl.load(at, mask=(p < programs)[:, None] & inside[None, :], other=0.0)
    tl.store(dtable + entry * H + h, tl.sum(tl.sum(total, 1), 0).to(dtable.dtype.element_ty))
