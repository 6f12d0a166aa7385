# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
"""The kernels of windows that are more than one block of rows: those of 12 x 12 and 16 x 16 tokens, and exact fp32.

A program owns one block of rows (or of columns) of one head and takes every P-th window. What lies along the other side
of the scores, N tokens, is cut into PARTS of CHUNK tokens and one of TAIL: 144 tokens are 128 and 16, where one power
of 2 would be 256.

    forward    out = softmax(S) v for BM rows, part by part (FlashAttention's running maximum)
    rows       dq and the bias gradient of BM rows; Sᵀ in full, so the bias gradient stays in registers over all windows
    columns    dk and dv of BN columns, from the sums that `rows` keeps: log-sum-exp of S, and Σ P ∘ dP

Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, from which is the split of the backward pass. log2(e) is
multiplied into scale, bias and mask, so exp2 takes the place of exp; keys outside the window have a bias of -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accel.kernels.launching import PlannedKernel
from accel.kernels.window_attention.triton import _LOG2E, _is_edge, _kept, _log2_bias, _map_rows, _normalised, _place


@triton.jit
def _part(c: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr):
    """Return the tokens of part `c`."""
    if c < N // CHUNK:
        return c * CHUNK + tl.arange(0, CHUNK)
    else:
        return c * CHUNK + tl.arange(0, TAIL)


@triton.jit
def _at_edge(w, Y, X, WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr):
    """Return whether window `w` may hold patches that were not neighbours."""
    _, down, right = _place(w, Y, X, WH, WW)
    return _is_edge(down, right, Y, X, WH, WW, SH, SW)


@triton.jit
def _mask(regions, w, n_regions, i, j, N: tl.constexpr, LOG2_MASK: tl.constexpr):
    """Return log2(e) · mask of queries `i` and keys `j`, which broadcast.

    Regions are loaded where they are needed: what is computed of tokens alone, the compiler keeps in registers.
    """
    here = regions + (w % n_regions) * N
    mine, theirs = tl.load(here + i, mask=i < N, other=0), tl.load(here + j, mask=j < N, other=0)
    return tl.where(mine == theirs, 0.0, LOG2_MASK)


@triton.jit
def _loaded(base, rows, h, which: tl.constexpr, t, d, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """Return tokens of one tensor in [B·Y·X, which of 3, H, D], 0 outside the window."""
    at = (rows * 3 * H + which * H + h)[:, None] * D + d[None, :]
    return tl.load(base + at, mask=(t < N)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _unit(x, COSINE: tl.constexpr):
    """Return x with rows of norm 1 in its own dtype, as cosine attention has it; else x."""
    if COSINE:
        unit, _ = _normalised(x)
        return unit.to(x.dtype)
    else:
        return x


@PlannedKernel
@triton.jit
def _fwd_blocks_kernel(
    qkv,  # [B·Y·X, 3, H, D]
    table,  # [T, H]
    head_scale,  # [H], cosine attention only
    regions,  # [n_regions, N] uint8, masked only
    seed,  # [1] int64, dropout only
    out,  # [B·Y·X, H, D]
    windows, n_regions, Y, X,
    SCALE: tl.constexpr, LOG2_MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WH * WW
    first, h = tl.program_id(0), tl.program_id(1)
    i = tl.program_id(2) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    own = (i < N)[:, None] & (d < D)[None, :]
    scale = SCALE * _LOG2E
    if COSINE:
        scale = tl.load(head_scale + h).to(tl.float32) * _LOG2E
    bias = ()
    for c in tl.static_range(PARTS):
        bias += (_log2_bias(table, h, i[:, None], _part(c, N, CHUNK, TAIL)[None, :], H, N, WH, WW),)
    for w in range(first, windows, tl.num_programs(0)):
        rows = _map_rows(w, i, Y, X, WH, WW, SH, SW, WIDE)
        q = _unit(_loaded(qkv, rows, h, 0, i, d, H, D, N), COSINE)
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        o = tl.zeros((BM, DP), tl.float32)
        for c in tl.static_range(PARTS):
            j = _part(c, N, CHUNK, TAIL)
            columns = _map_rows(w, j, Y, X, WH, WW, SH, SW, WIDE)
            k = _unit(_loaded(qkv, columns, h, 1, j, d, H, D, N), COSINE)
            v = _loaded(qkv, columns, h, 2, j, d, H, D, N)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias[c]
            if MASKED:  # noqa: SIM102 (known when it is compiled; without it regions are None)
                if _at_edge(w, Y, X, WH, WW, SH, SW):
                    scores += _mask(regions, w, n_regions, i[:, None], j[None, :], N, LOG2_MASK)
            highest = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet, with a mask of -inf
            p = tl.exp2(scores - finite[:, None])
            shrunk = tl.exp2(top - finite)
            total = total * shrunk + tl.sum(p, 1)
            if DROPOUT > 0:
                p *= _kept(seed, w, h, i[:, None] * NP + j[None, :], H, DROPOUT)
            o = o * shrunk[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            top = highest
        o /= tl.where(i < N, total, 1.0)[:, None]
        tl.store(out + (rows * H + h)[:, None] * D + d[None, :], o.to(out.dtype.element_ty), mask=own)


@PlannedKernel
@triton.jit
def _rows_kernel(
    qkv,  # [B·Y·X, 3, H, D]
    table,  # [T, H]
    head_scale,  # [H], cosine attention only
    regions,  # [n_regions, N] uint8, masked only
    seed,  # [1] int64, dropout only
    dout,  # [B·Y·X, H, D]
    dqkv,  # [B·Y·X, 3, H, D]; q's part is written
    sums,  # [2, B·Y·X, H] fp32: log2 of the sum of exp2 of S, and the mean of dP, Σ P ∘ dP
    dbias,  # [P, H, N, N] fp32
    dscale,  # [P, blocks, H] fp32, cosine attention only
    windows, n_regions, Y, X,
    SCALE: tl.constexpr, LOG2_MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WH * WW
    first, h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = block * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    own = (i < N)[:, None] & (d < D)[None, :]
    scale = SCALE
    if COSINE:
        scale = tl.load(head_scale + h).to(tl.float32)
    bias, summed = (), ()
    for c in tl.static_range(PARTS):
        j = _part(c, N, CHUNK, TAIL)
        bias += (_log2_bias(table, h, i[None, :], j[:, None], H, N, WH, WW),)
        summed += (tl.zeros((j.shape[0], BM), tl.float32),)
    summed_scale = 0.0
    for w in range(first, windows, tl.num_programs(0)):
        rows = _map_rows(w, i, Y, X, WH, WW, SH, SW, WIDE)
        q = _loaded(qkv, rows, h, 0, i, d, H, D, N)
        do = tl.load(dout + (rows * H + h)[:, None] * D + d[None, :], mask=own, other=0.0)
        if COSINE:
            q_unit, q_inverse = _normalised(q)
            q = q_unit.to(q.dtype)
        keys, values, scores = (), (), ()
        top = tl.full((BM,), float("-inf"), tl.float32)
        for c in tl.static_range(PARTS):
            j = _part(c, N, CHUNK, TAIL)
            columns = _map_rows(w, j, Y, X, WH, WW, SH, SW, WIDE)
            keys += (_unit(_loaded(qkv, columns, h, 1, j, d, H, D, N), COSINE),)
            values += (_loaded(qkv, columns, h, 2, j, d, H, D, N),)
            s = tl.dot(keys[c], tl.trans(q), input_precision=PRECISION) * (scale * _LOG2E) + bias[c]
            if MASKED:  # noqa: SIM102
                if _at_edge(w, Y, X, WH, WW, SH, SW):
                    s += _mask(regions, w, n_regions, i[None, :], j[:, None], N, LOG2_MASK)
            scores += (s,)
            top = tl.maximum(top, tl.max(s, 0))
        # Rows outside the window see no key if the mask is -inf. They stay finite, as dscale is a sum over all.
        top = tl.where(i < N, top, 0.0)
        total, mean = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
        weights, dps = (), ()
        for c in tl.static_range(PARTS):
            p = tl.exp2(scores[c] - top[None, :])
            total += tl.sum(p, 0)
            dp = tl.dot(values[c], tl.trans(do), input_precision=PRECISION)
            if DROPOUT > 0:
                dp *= _kept(seed, w, h, i[None, :] * NP + _part(c, N, CHUNK, TAIL)[:, None], H, DROPOUT)
            mean += tl.sum(p * dp, 0)
            weights += (p,)
            dps += (dp,)
        total = tl.where(i < N, total, 1.0)
        inverse = 1.0 / total
        mean *= inverse
        at_sums = sums + rows * H + h
        tl.store(at_sums, top + tl.log2(total), mask=i < N)
        tl.store(at_sums + windows * (N * H), mean, mask=i < N)
        dq = tl.zeros((BM, DP), tl.float32)
        grown = ()
        for c in tl.static_range(PARTS):
            ds = weights[c] * inverse[None, :] * (dps[c] - mean[None, :])
            grown += (summed[c] + ds,)
            dq += tl.dot(tl.trans(ds.to(do.dtype)), keys[c], input_precision=PRECISION)
        summed = grown
        if COSINE:
            projected = tl.sum(dq * q_unit, 1)
            summed_scale += tl.sum(projected)
            dq = (dq - q_unit * projected[:, None]) * q_inverse[:, None]
        at = (rows * 3 * H + h)[:, None] * D + d[None, :]
        tl.store(dqkv + at, (dq * scale).to(dqkv.dtype.element_ty), mask=own)
    for c in tl.static_range(PARTS):
        j = _part(c, N, CHUNK, TAIL)
        partial = dbias + (first * H + h).to(tl.int64) * N * N
        tl.store(partial + i[None, :] * N + j[:, None], summed[c], mask=(i < N)[None, :] & (j < N)[:, None])
    if COSINE:
        tl.store(dscale + (first * tl.num_programs(2) + block) * H + h, summed_scale)


@PlannedKernel
@triton.jit
def _columns_kernel(
    qkv,  # [B·Y·X, 3, H, D]
    table,  # [T, H]
    head_scale,  # [H], cosine attention only
    regions,  # [n_regions, N] uint8, masked only
    seed,  # [1] int64, dropout only
    dout,  # [B·Y·X, H, D]
    sums,  # [2, B·Y·X, H] fp32, as `_rows_kernel` writes it
    dqkv,  # [B·Y·X, 3, H, D]; k's and v's parts are written
    windows, n_regions, Y, X,
    SCALE: tl.constexpr, LOG2_MASK: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = WH * WW
    first, h = tl.program_id(0), tl.program_id(1)
    j = tl.program_id(2) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    own = (j < N)[:, None] & (d < D)[None, :]
    scale = SCALE
    if COSINE:
        scale = tl.load(head_scale + h).to(tl.float32)
    bias = ()
    for c in tl.static_range(PARTS):
        bias += (_log2_bias(table, h, _part(c, N, CHUNK, TAIL)[:, None], j[None, :], H, N, WH, WW),)
    for w in range(first, windows, tl.num_programs(0)):
        columns = _map_rows(w, j, Y, X, WH, WW, SH, SW, WIDE)
        k = _loaded(qkv, columns, h, 1, j, d, H, D, N)
        v = _loaded(qkv, columns, h, 2, j, d, H, D, N)
        if COSINE:
            k_unit, k_inverse = _normalised(k)
            k = k_unit.to(v.dtype)
        dk = tl.zeros((BM, DP), tl.float32)
        dv = tl.zeros((BM, DP), tl.float32)
        for c in tl.static_range(PARTS):
            i = _part(c, N, CHUNK, TAIL)
            rows = _map_rows(w, i, Y, X, WH, WW, SH, SW, WIDE)
            q = _unit(_loaded(qkv, rows, h, 0, i, d, H, D, N), COSINE)
            at = (rows * H + h)[:, None] * D + d[None, :]
            do = tl.load(dout + at, mask=(i < N)[:, None] & (d < D)[None, :], other=0.0)
            at_sums = sums + rows * H + h
            logs = tl.load(at_sums, mask=i < N, other=float("inf"))
            mean = tl.load(at_sums + windows * (N * H), mask=i < N, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E) + bias[c]
            if MASKED:  # noqa: SIM102
                if _at_edge(w, Y, X, WH, WW, SH, SW):
                    scores += _mask(regions, w, n_regions, i[:, None], j[None, :], N, LOG2_MASK)
            p = tl.exp2(scores - logs[:, None])
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            weights = p
            if DROPOUT > 0:
                times = _kept(seed, w, h, i[:, None] * NP + j[None, :], H, DROPOUT)
                dp *= times
                weights = p * times
            dv += tl.dot(tl.trans(weights.to(v.dtype)), do, input_precision=PRECISION)
            ds = p * (dp - mean[:, None])
            dk += tl.dot(tl.trans(ds.to(v.dtype)), q, input_precision=PRECISION)
        if COSINE:
            dk = (dk - k_unit * tl.sum(dk * k_unit, 1)[:, None]) * k_inverse[:, None]
        at = (columns * 3 * H + H + h)[:, None] * D + d[None, :]
        tl.store(dqkv + at, (dk * scale).to(dqkv.dtype.element_ty), mask=own)
        tl.store(dqkv + at + H * D, dv.to(dqkv.dtype.element_ty), mask=own)
