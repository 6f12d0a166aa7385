"""One switch for how float32 products are computed, which leaves torch's older switches readable.

torch has three ways to allow TF32: `set_float32_matmul_precision`, `allow_tf32`, and since 2.9 `fp32_precision`. Set by
the last alone, each reading of the others raises "you have used mix of the legacy and new APIs", wherever it stands: in
the user's script, in a framework. Here all of them are set together, and all are put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel.errors import InvalidArgument

if TYPE_CHECKING:
    from accel.run import Run

Precision = Literal["ieee", "tf32"]


class fp32_precision:  # noqa: N801  it is called as torch.set_grad_enabled is
    """Set how float32 matrix products and convolutions run on CUDA: at once, and back at the end of a `with` block.

    TF32 has the range of float32 and a mantissa of 10 bits; GPUs of compute capability 8.0 and newer have cores for it.
    Elsewhere nothing changes.

    Args:
        matmul: of matrix products, "ieee" or "tf32"; torch's default is "ieee". "ieee" is for those on the CPU too.
        convolutions: of convolutions and recurrent layers; default as `matmul`. torch's own default is "tf32".

    Raises:
        InvalidArgument: for another word.

    Example:
        >>> with fp32_precision("tf32"):
        ...     product = torch.ones(2, 2) @ torch.ones(2, 2)

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """

    def __init__(self, matmul: Precision, convolutions: Precision | None = None) -> None:
        convolutions = matmul if convolutions is None else convolutions
        for name, value in (("matmul", matmul), ("convolutions", convolutions)):
            if value not in ("ieee", "tf32"):
                raise InvalidArgument(f'fp32_precision: {name} must be "ieee" or "tf32". Found: {value!r}')
        self._restore = [_products(), _convolutions()]
        if matmul == "tf32":
            if not _read(lambda: torch.backends.cuda.matmul.allow_tf32):  # "medium" allows it already
                torch.backends.cuda.matmul.allow_tf32 = True
        else:  # the host's products too: with those of CUDA alone torch refuses to name the precision
            torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = convolutions == "tf32"

    def __enter__(self) -> fp32_precision:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put back what was set before, by whichever way."""
        for restore in self._restore:
            restore()
        self._restore.clear()


@contextlib.contextmanager
def autocast_of_call(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Compute a call of a model under autocast, and leave nothing of that behind.

    Args:
        device: its type, such as "cuda".
        dtype: float16 or bfloat16.
    """
    before = torch.is_autocast_enabled(device)
    try:
        with torch.autocast(device, dtype=dtype):
            yield
    finally:
        # Within autocast(enabled=False) of the loop's own, around an epoch say, torch keeps the casts of weights beyond
        # this call, and would use them after the next update.
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before)  # what interrupts its beginning or end leaves it as it is


@contextlib.contextmanager
def outside_autocast(device_type: str) -> Iterator[None]:
    """Leave the loop's autocast for a block, and what it has cast as it is: no cast made within the block is kept.

    That of a weight would belong to a graph that is gone when the loop uses it.
    """
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    is_kept = torch.is_autocast_cache_enabled()
    try:
        with torch.autocast(device_type, enabled=False, cache_enabled=False):
            yield
    finally:
        torch.set_autocast_cache_enabled(is_kept)


def why_no_bfloat16(run: Run) -> str:
    """Say why the model's calls should not be made in bfloat16; '' if nothing speaks against it.

    Args:
        run: of a model whose weights stay in float32.
    """
    if run.observed.autocast:
        return "the loop runs the model under an autocast of its own"
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in run.optimizers):
        return "LBFGS builds its curvature from differences of gradients, which bfloat16 rounds away"
    if run.observed.distribution:
        return f"the model returns a {run.observed.distribution}, whose tensors would stay in bfloat16"
    if run.cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "the GPU has no bfloat16 arithmetic (compute capability 8.0 or newer has)"
    return ""


def allows_tf32() -> bool:
    """Return whether matrix products, convolutions and recurrent layers may all use TF32."""
    return all(each.fp32_precision == "tf32" for each in (torch.backends.cuda.matmul, *_cudnn()))


def convolutions_use_tf32() -> bool:
    """Return whether convolutions or recurrent layers use TF32, as they do by default."""
    return any(each.fp32_precision == "tf32" for each in _cudnn())


def products_use_tf32() -> bool:
    """Return whether matrix products use TF32."""
    matmul: Any = torch.backends.cuda.matmul
    return bool(matmul.fp32_precision == "tf32")


def _products() -> Callable[[], None]:
    backends: Any = torch.backends
    matmul, host = backends.cuda.matmul, backends.mkldnn.matmul
    new, of_host = matmul.fp32_precision, host.fp32_precision
    named = _read(torch.get_float32_matmul_precision)
    allowed = _read(lambda: matmul.allow_tf32)

    def restore() -> None:
        if named is not None:
            torch.set_float32_matmul_precision(named)
        else:  # where the ways disagreed, the older one was what the newer one was not
            matmul.allow_tf32 = new != "tf32" if allowed is None else allowed
        matmul.fp32_precision, host.fp32_precision = new, of_host

    return restore


def _convolutions() -> Callable[[], None]:
    cudnn: Any = torch.backends.cudnn
    new = [each.fp32_precision for each in _cudnn()]
    old = _read(lambda: cudnn.allow_tf32)

    def restore() -> None:
        cudnn.allow_tf32 = all(value != "tf32" for value in new) if old is None else old
        for each, value in zip(_cudnn(), new, strict=True):
            each.fp32_precision = value

    return restore


def _read(switch: Callable[[], Any]) -> Any:
    """Return a switch's state, None where torch refuses to tell."""
    with contextlib.suppress(RuntimeError):
        return switch()
    return None


def _cudnn() -> tuple[Any, Any]:
    cudnn: Any = torch.backends.cudnn
    return cudnn.conv, cudnn.rnn
