"""Swin's window attention with a learned relative position bias and shifted windows, as one op.

    out = dropout(softmax(scale · q kᵀ + bias + mask)) v        per window and head
    bias[h, i, j] = table[index(i, j), h]                       index: offset between tokens i and j
    mask[i, j] = 0 if region(i) = region(j) else mask_value     after a cyclic shift only

Legend: B images, Y × X tokens in a map, W windows of N = tall · wide tokens, H heads of D channels,
T = (2·tall − 1)(2·wide − 1) rows of the bias table.

Swin V2's cosine attention takes `head_scale`: q and k are then divided by their norms. On a GPU forward is one launch,
backward one or, above 64 tokens, two (and a small one for the table). They read q, k, v in place, fold roll, partition
and merge into addresses, keep softmax in fp32 and save only qkv. Elsewhere it is the plain torch below.

Liu et al., Swin Transformer, https://arxiv.org/abs/2103.14030; V2, https://arxiv.org/abs/2111.09883.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from accel.kernels import support
from accel.kernels.support import Cost
from accel.kernels.tables import held, hides_values
from accel.kernels.window_attention.regions import mask_of_regions, merge, partition, relative_index, shift_regions
from accel.profiler.errors import InvalidArgument

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_TOKENS = 256
_WIDEST_HEAD = 128


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The constants of a layer."""

    heads: int
    window: tuple[int, int]
    """Height and width, tokens."""
    shift: tuple[int, int] = (0, 0)
    """Roll of the map up and to the left, tokens."""
    scale: float = 1.0
    """Factor of q kᵀ; not used with a head scale."""
    mask_value: float = -100.0
    """Added between tokens of different regions."""
    dropout: float = 0.0
    """Share of attention weights set to zero."""

    @property
    def tokens(self) -> int:
        """Tokens in a window."""
        return self.window[0] * self.window[1]

    @property
    def entries(self) -> int:
        """Rows of the bias table."""
        return (2 * self.window[0] - 1) * (2 * self.window[1] - 1)


class CheckedCall(NamedTuple):
    """What is known of a call with these shapes, dtypes and numbers, once it was checked."""

    spec: Spec
    is_empty: bool
    plans: dict[Hashable, Any]
    """How its kernels are launched, filled by them: by what else may differ from call to call."""
    regions: list[Tensor]
    """Of the shifted map, filled by the first call whose tensors have values."""


def window_attention(
    qkv: Tensor,
    table: Tensor,
    *,
    heads: int,
    window: tuple[int, int],
    regions: Tensor | None = None,
    scale: float | None = None,
    head_scale: Tensor | None = None,
    mask_value: float = -100.0,
    dropout: float = 0.0,
) -> Tensor:
    """Attend within windows that have been cut out already.

    Args:
        qkv: [W, N, 3·H·D], as the linear layer before it returns it: q, then k, then v, each head by head.
        table: relative position bias, [T, H].
        heads: H.
        window: height and width, tokens; N is their product, at most 256.
        regions: uint8 [windows of one image, N]; window w belongs to row w modulo their number. None: one region.
        scale: factor of q kᵀ; default D ** -0.5. Not to be given with `head_scale`.
        head_scale: [H], factor of each head's cosines in Swin V2 (its clamped exponential, not its logarithm).
        mask_value: added between regions; default -100, as all published versions have it.
        dropout: share of attention weights set to zero, 0 ≤ dropout < 1; default 0.

    Returns:
        [W, N, H·D] in qkv's dtype.

    Raises:
        InvalidArgument: if shapes, dtypes or devices don't fit; the message says which.

    Example:
        >>> qkv, table = torch.randn(8, 49, 3 * 64), torch.zeros(169, 2)
        >>> window_attention(qkv, table, heads=2, window=(7, 7)).shape
        torch.Size([8, 49, 64])

    Source: https://arxiv.org/abs/2103.14030, section 3.2.
    """
    known = _checked(_check_windows, qkv, table, head_scale, heads, window, (0, 0), scale, mask_value, dropout)
    regions = _checked_regions(regions, qkv, known.spec)
    tall, wide = known.spec.window
    out = _attend(qkv.reshape(qkv.shape[0], tall, wide, qkv.shape[-1]), table, head_scale, regions, known)
    return out.reshape(*qkv.shape[:2], qkv.shape[-1] // 3)


def shifted_window_attention(
    qkv: Tensor,
    table: Tensor,
    *,
    heads: int,
    window: tuple[int, int],
    shift: tuple[int, int] = (0, 0),
    scale: float | None = None,
    head_scale: Tensor | None = None,
    mask_value: float = -100.0,
    dropout: float = 0.0,
) -> Tensor:
    """Attend within the windows of a map, rolled by `shift`: no roll, partition or merge is made.

    Equal to rolling the map by -shift, cutting it into windows, attending with the mask of the shift, putting the
    windows together and rolling back.

    Args:
        qkv: [B, Y, X, 3·H·D]; Y and X are multiples of the window's height and width.
        table: relative position bias, [T, H].
        heads: H.
        window: height and width, tokens; their product is at most 256.
        shift: tokens by which the map is rolled up and to the left; default none.
        scale: factor of q kᵀ; default D ** -0.5. Not to be given with `head_scale`.
        head_scale: [H], factor of each head's cosines in Swin V2.
        mask_value: added between regions; default -100.
        dropout: share of attention weights set to zero, 0 ≤ dropout < 1; default 0.

    Returns:
        [B, Y, X, H·D] in qkv's dtype.

    Raises:
        InvalidArgument: if shapes, dtypes or devices don't fit; the message says which.

    Example:
        >>> qkv, table = torch.randn(2, 14, 14, 3 * 64), torch.zeros(169, 2)
        >>> shifted_window_attention(qkv, table, heads=2, window=(7, 7), shift=(3, 3)).shape
        torch.Size([2, 14, 14, 64])

    Source: https://arxiv.org/abs/2103.14030, section 3.2.
    """
    known = _checked(_check_map, qkv, table, head_scale, heads, window, shift, scale, mask_value, dropout)
    return _attend(qkv, table, head_scale, _own_regions(qkv, known), known)


def _own_regions(qkv: Tensor, known: CheckedCall) -> Tensor | None:
    """Return the regions of a shifted map; None where there is one, and where the operator looks them up itself."""
    spec = known.spec
    if known.is_empty or spec.shift == (0, 0):
        return None
    hidden = hides_values()
    if known.regions and not hidden:
        return held(known.regions[0])
    # A compiler would build the table, on the CPU, in every step.
    if hidden and torch.compiler.is_compiling() and _runs_kernels(qkv):
        return None
    regions = shift_regions((qkv.shape[1], qkv.shape[2]), spec.window, spec.shift, qkv.device)
    if not hidden:
        known.regions[:] = [regions]
    return regions


def cost(windows: int, spec: Spec, head_channels: int, element_bytes: int, *, backward: bool = False) -> Cost:
    """Return the least work of the op: qkv read, out written; backward qkv, dout and dqkv.

    Args:
        windows: W.
        spec: the layer.
        head_channels: D.
        element_bytes: of qkv.
        backward: the backward pass instead: five products for the forward's two, and seven tensors for its four.
    """
    product = 2.0 * windows * spec.heads * spec.tokens * spec.tokens * head_channels
    tensor = float(windows * spec.heads * spec.tokens * head_channels * element_bytes)
    return Cost(flops=5 * product, bytes=7 * tensor) if backward else Cost(flops=2 * product, bytes=4 * tensor)


# -- the reference -----------------------------------------------------------------------------------------------------


def window_attention_ref(
    qkv: Tensor, table: Tensor, head_scale: Tensor | None, regions: Tensor | None, spec: Spec
) -> Tensor:
    """Attend within windows in plain torch: the path on a CPU, and the reference for the kernels.

    Args:
        qkv: [W, N, 3·H·D].
        table: [T, H].
        head_scale: [H] or None.
        regions: [windows of one image, N] or None.
        spec: the layer.

    Returns:
        [W, N, H·D].
    """
    windows, tokens, channels = qkv.shape
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(wide).view(windows, tokens, 3, spec.heads, channels // (3 * spec.heads)).permute(2, 0, 3, 1, 4)
    if head_scale is None:
        scores = (q * spec.scale) @ k.transpose(-2, -1)
    else:
        cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = cosines * head_scale.to(wide).view(-1, 1, 1)
    index = relative_index(spec.window, qkv.device)
    scores = scores + table.to(wide)[index.view(-1)].view(tokens, tokens, spec.heads).permute(2, 0, 1)
    if regions is not None:
        mask = mask_of_regions(regions, spec.mask_value, scores.dtype)[:, None]
        scores = (scores.unflatten(0, (-1, regions.shape[0])) + mask).flatten(0, 1)
    weights = F.dropout(scores.softmax(-1), spec.dropout)
    out: Tensor = (weights @ v).transpose(1, 2).flatten(2).to(qkv.dtype)
    return out


def shifted_window_attention_ref(
    qkv: Tensor, table: Tensor, head_scale: Tensor | None, regions: Tensor | None, spec: Spec
) -> Tensor:
    """Attend within the windows of a rolled map in plain torch: roll, partition, attend, merge, roll back.

    Args:
        qkv: [B, Y, X, 3·H·D].
        table: [T, H].
        head_scale: [H] or None.
        regions: [windows of one image, N] or None.
        spec: the layer.

    Returns:
        [B, Y, X, H·D].
    """
    size = qkv.shape[1], qkv.shape[2]
    rolled = qkv.roll((-spec.shift[0], -spec.shift[1]), (1, 2)) if any(spec.shift) else qkv
    attended = window_attention_ref(partition(rolled, spec.window), table, head_scale, regions, spec)
    out = merge(attended, spec.window, size)
    return out.roll(spec.shift, (1, 2)) if any(spec.shift) else out


# -- the choice of the path --------------------------------------------------------------------------------------------


# Asked for once, at import: torch 2.11 can't trace the question.
_WITH_AUTOCAST = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


def _runs_kernels(qkv: Tensor) -> bool:
    return support.runs_triton(qkv) and qkv.dtype != torch.float64


def _attend(
    qkv: Tensor, table: Tensor, head_scale: Tensor | None, regions: Tensor | None, known: CheckedCall
) -> Tensor:
    """Attend within the windows of a map [B, Y, X, 3·H·D], by the path for its device."""
    if torch._C._is_any_autocast_enabled():
        kind = qkv.device.type
        if kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind):
            if qkv.dtype != torch.float64:
                qkv = qkv.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):
                return _attend(qkv, table, head_scale, regions, known)
    if known.is_empty:  # the table still gets its gradient, which is zero
        return qkv[..., : qkv.shape[-1] // 3] + 0 * table.sum().to(qkv.dtype)
    if not _runs_kernels(qkv):
        return shifted_window_attention_ref(qkv, table, head_scale, regions, known.spec)
    out: Tensor = _kernels().attend(qkv.contiguous(), table, head_scale, regions, known)
    return out


@functools.cache
def _kernels() -> Any:
    from accel.kernels.window_attention import op

    return op


# -- what a call must be -----------------------------------------------------------------------------------------------


_MOST_CHECKED = 512
_checked_calls: dict[Hashable, CheckedCall] = {}


def _checked(
    check: Callable[[Tensor, Any, Any], None], qkv: Tensor, table: Tensor, head_scale: Tensor | None, *numbers: Any
) -> CheckedCall:
    """Check a call; what was checked once, with the same shapes, dtypes and numbers, is known."""
    if torch.compiler.is_compiling():
        return _made(check, qkv, table, head_scale, *numbers)
    third = None if head_scale is None else (head_scale.shape, head_scale.dtype, head_scale.device)
    key = (check, qkv.shape, qkv.dtype, qkv.device, table.shape, table.dtype, table.device, third, numbers)
    try:
        known = _checked_calls.get(key)
    except TypeError:  # a list for a window, or what is no number at all
        return _made(check, qkv, table, head_scale, *numbers)
    if known is None:
        known = _made(check, qkv, table, head_scale, *numbers)
        if len(_checked_calls) >= _MOST_CHECKED:
            _checked_calls.clear()
        _checked_calls[key] = known
    return known


def _made(check: Callable[[Tensor, Any, Any], None], qkv: Tensor, *rest: Any) -> CheckedCall:
    _table, _head_scale, _heads, window, shift, *_ = rest
    check(qkv, window, shift)
    return CheckedCall(_spec(qkv, *rest), qkv.numel() == 0, {}, [])


def _check_windows(qkv: Tensor, window: tuple[int, int], shift: tuple[int, int]) -> None:
    _check_pair("window", window)
    if qkv.dim() != 3 or qkv.shape[1] != window[0] * window[1]:
        raise InvalidArgument(
            f"window_attention: qkv must be [windows, {window[0] * window[1]}, 3·H·D] for windows of {window}. "
            f"Found: {list(qkv.shape)}; a map goes to shifted_window_attention"
        )


def _check_map(qkv: Tensor, window: tuple[int, int], shift: tuple[int, int]) -> None:
    _check_pair("window", window)
    _check_pair("shift", shift)
    if qkv.dim() != 4 or qkv.shape[1] % window[0] or qkv.shape[2] % window[1]:
        raise InvalidArgument(
            f"shifted_window_attention: qkv must be [B, Y, X, 3·H·D] with Y and X multiples of {window}. "
            f"Found: {list(qkv.shape)}; pad the map first"
        )
    if not all(0 <= s < w for s, w in zip(shift, window, strict=True)):
        raise InvalidArgument(f"shifted_window_attention: shift must be in [0, window). Found: {shift} for {window}")


def _spec(
    qkv: Tensor,
    table: Tensor,
    head_scale: Tensor | None,
    heads: int,
    window: tuple[int, int],
    shift: tuple[int, int],
    scale: float | None,
    mask_value: float,
    dropout: float,
) -> Spec:
    if heads < 1 or qkv.shape[-1] % (3 * heads):
        raise InvalidArgument(
            f"window_attention: the last dimension of qkv must be 3 · heads · D. Found: {qkv.shape[-1]} for "
            f"{heads} heads"
        )
    if not 0 <= dropout < 1:
        raise InvalidArgument(f"window_attention: dropout must be in [0, 1). Found: {dropout}")
    if scale is not None and head_scale is not None:
        raise InvalidArgument("window_attention: give scale or head_scale, not both")
    if scale is None:
        scale = (qkv.shape[-1] // (3 * heads)) ** -0.5 if qkv.shape[-1] else 1.0
    tall, wide = (int(side) for side in window)
    down, right = (int(side) for side in shift)
    spec = Spec(
        heads=heads, window=(tall, wide), shift=(down, right), scale=scale, mask_value=mask_value, dropout=dropout
    )
    _check(qkv, table, head_scale, spec)
    return spec


def _check_pair(name: str, pair: object) -> None:
    # torch 2.9 can't compile `tuple | list`.
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(side, int) for side in pair):
        raise InvalidArgument(f"window_attention: {name} must be two whole numbers, height and width. Found: {pair!r}")
    if name == "window" and min(pair) < 1:
        raise InvalidArgument(f"window_attention: window must be at least 1 token each way. Found: {pair!r}")


def _check(qkv: Tensor, table: Tensor, head_scale: Tensor | None, spec: Spec) -> None:
    if qkv.dtype not in _DTYPES:
        raise InvalidArgument(f"window_attention: qkv must be floating point. Found: {qkv.dtype}")
    if not 1 <= spec.tokens <= _MOST_TOKENS or qkv.shape[-1] // (3 * spec.heads) > _WIDEST_HEAD:
        raise InvalidArgument(
            f"window_attention: windows may have 1 to {_MOST_TOKENS} tokens and heads up to {_WIDEST_HEAD} channels. "
            f"Found: windows of {spec.window}, heads of {qkv.shape[-1] // (3 * spec.heads)}"
        )
    if tuple(table.shape) != (spec.entries, spec.heads):
        raise InvalidArgument(
            f"window_attention: table must be [{spec.entries}, {spec.heads}] for windows of {spec.window}. "
            f"Found: {list(table.shape)}"
        )
    if head_scale is not None and head_scale.numel() != spec.heads:
        raise InvalidArgument(f"window_attention: head_scale must be [{spec.heads}]. Found: {list(head_scale.shape)}")
    for name, tensor in (("table", table), ("head_scale", head_scale)):
        if tensor is not None and not tensor.is_floating_point():
            raise InvalidArgument(
                f"window_attention: {name} must be floating point, it is learned. Found: {tensor.dtype}; convert it "
                "with .float()"
            )
        if tensor is not None and tensor.device != qkv.device:
            raise InvalidArgument(
                f"window_attention: {name} must be on qkv's device, {qkv.device}. Found: {tensor.device}; move it"
            )


def _checked_regions(regions: Tensor | None, qkv: Tensor, spec: Spec) -> Tensor | None:
    if regions is None:
        return None
    fits = regions.dim() == 2 and regions.shape[1] == spec.tokens and regions.shape[0] > 0
    if not fits or regions.dtype != torch.uint8 or qkv.shape[0] % regions.shape[0]:
        raise InvalidArgument(
            f"window_attention: regions must be uint8 [n, {spec.tokens}] with n a divisor of {qkv.shape[0]} windows. "
            f"Found: {regions.dtype} {list(regions.shape)}"
        )
    if regions.device != qkv.device:
        raise InvalidArgument(f"window_attention: regions must be on {qkv.device}. Found: {regions.device}; move them")
    return regions.contiguous()
