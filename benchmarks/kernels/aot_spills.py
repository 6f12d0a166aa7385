"""What the ahead-of-time gate excuses: spills that neither other tiles nor more warps take away, and why."""

from __future__ import annotations

_STACK_BYTES = {
    # Windows of one block: q and k beside their gradients (cosine), dk and dv of every token (64 channels, dropout).
    "window_attention backward 7x7 D32 fp16 masked cosine": (0, 0, 8),
    "window_attention backward 7x7 D32 bf16 masked cosine": (0, 0, 8),
    "window_attention backward 7x7 D64 fp16 masked cosine": (248, 16, 0),
    "window_attention backward 7x7 D64 bf16 masked cosine": (256, 16, 0),
    "window_attention backward 8x8 D64 fp16 masked": (72, 0, 0),
    "window_attention backward 8x8 D64 fp16 masked cosine": (192, 16, 0),
    "window_attention backward 8x8 D64 bf16 masked": (72, 0, 0),
    "window_attention backward 8x8 D64 bf16 masked cosine": (200, 16, 0),
    "window_attention backward 7x7 D128 fp16 masked": (8, 48, 0),
    "window_attention backward 7x7 D16 fp16 masked cosine": (0, 8, 0),
    "window_attention backward 7x7 D16 bf16 masked cosine": (0, 8, 0),
    "window_attention forward 7x7 D32 fp16 masked dropout": (0, 0, 16),
    "window_attention forward 7x7 D32 bf16 masked dropout": (0, 0, 16),
    "window_attention backward 7x7 D64 fp16 masked": (56, 0, 8),
    "window_attention backward 7x7 D64 bf16 masked": (56, 0, 8),
    "window_attention backward 8x8 D32 fp16 masked cosine": (8, 0, 0),
    "window_attention backward 8x8 D32 bf16 masked cosine": (8, 0, 0),
    "window_attention backward 7x7 D32 fp32 masked tf32": (8, 0, 0),
    "window_attention backward 7x7 D32 fp16 masked wide": (0, 8, 0),
    # Rows of a large window keep their scores, their bias and its gradient in registers; blocks of 16 rows would
    # spill less, and read k and v twice as often.
    "window_attention rows 7x7 D64 fp32 masked cosine": (16, 0, 0),
    "window_attention rows 12x12 D16 fp32 masked": (0, 0, 8),
    "window_attention rows 12x12 D16 fp32 masked cosine": (0, 8, 8),
    "window_attention rows 12x12 D32 fp32 masked": (0, 16, 8),
    "window_attention rows 12x12 D32 fp32 masked cosine": (0, 16, 16),
    "window_attention rows 12x12 D32 fp32 masked dropout": (8, 16, 16),
    "window_attention rows 12x12 D32 fp16 masked": (8, 0, 0),
    "window_attention rows 12x12 D32 fp16 masked cosine": (8, 0, 8),
    "window_attention rows 12x12 D32 fp16 masked dropout": (40, 16, 64),
    "window_attention rows 12x12 D32 bf16 masked": (8, 0, 0),
    "window_attention rows 12x12 D32 bf16 masked cosine": (8, 0, 8),
    "window_attention rows 12x12 D32 bf16 masked dropout": (40, 16, 64),
    "window_attention rows 12x12 D32 fp16": (8, 0, 0),
    "window_attention rows 12x12 D32 fp32 masked tf32": (8, 0, 0),
    "window_attention rows 12x12 D32 fp16 masked wide": (8, 0, 0),
    "window_attention rows 12x12 D32 fp16 masked given": (8, 0, 0),
    # Forward and columns keep the bias of a block, 64 rows of up to 256 tokens.
    "window_attention forward 12x12 D16 fp32 masked": (0, 8, 0),
    "window_attention columns 12x12 D32 fp32 masked": (0, 0, 8),
    "window_attention columns 12x12 D32 fp32 masked cosine": (0, 0, 8),
    "window_attention columns 12x12 D32 fp16 masked cosine": (0, 8, 0),
    "window_attention columns 12x12 D32 bf16 masked cosine": (40, 8, 0),
    "window_attention forward 12x12 D64 fp16 masked cosine": (8, 0, 0),
    "window_attention columns 12x12 D64 fp16 masked cosine": (0, 8, 0),
    "window_attention forward 12x12 D64 bf16 masked cosine": (8, 0, 0),
    "window_attention columns 12x12 D64 bf16 masked cosine": (0, 8, 0),
    "window_attention forward 16x16 D32 fp16": (40, 48, 0),
    "window_attention forward 16x16 D32 fp32 masked tf32": (0, 0, 8),
    "window_attention columns 16x16 D32 fp32 masked tf32": (0, 8, 0),
    "window_attention forward 16x16 D32 fp16 cosine": (32, 24, 0),
    "window_attention columns 12x12 D32 fp16 masked given": (8, 0, 0),
    "window_attention forward 16x16 D32 fp16 masked cosine given": (16, 16, 0),
}
"""Variant → bytes for compute capability 8.0, 9.0 and 10.0."""

KNOWN_SPILLS = {
    (variant, architecture): stack_bytes
    for variant, row in _STACK_BYTES.items()
    for architecture, stack_bytes in zip((80, 90, 100), row, strict=True)
    if stack_bytes
}
"""Variant and architecture → bytes of stack a thread may have; all others none."""
