"""Swin's window attention with a learned relative position bias and shifted windows, as one op."""

from __future__ import annotations

from accel.kernels.window_attention.attention import (
    Spec,
    cost,
    shifted_window_attention,
    shifted_window_attention_ref,
    window_attention,
    window_attention_ref,
)

__all__ = [
    "Spec",
    "cost",
    "shifted_window_attention",
    "shifted_window_attention_ref",
    "window_attention",
    "window_attention_ref",
]
