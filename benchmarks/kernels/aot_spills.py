"""What the ahead-of-time gate excuses: spills that neither other tiles nor more warps take away, and why."""

from __future__ import annotations

_STACK_BYTES = {
    # IEEE fp32 has no tensor cores, so the operands of a product lie in registers.
    "window_attention backward 12x12 D16 fp32 masked cosine": (0, 0, 88),
    "window_attention backward 12x12 D32 fp32 masked": (344, 240, 344),
    "window_attention backward 12x12 D32 fp32 masked cosine": (352, 216, 264),
    "window_attention backward 12x12 D32 fp32 masked dropout": (440, 312, 448),
    "window_attention forward 12x12 D64 fp32 masked": (312, 312, 312),
    "window_attention backward 12x12 D64 fp32 masked": (1440, 1280, 88),
    "window_attention forward 12x12 D64 fp32 masked cosine": (64, 64, 64),
    "window_attention backward 12x12 D64 fp32 masked cosine": (1800, 1608, 624),
    "window_attention backward 16x16 D32 fp32 masked": (296, 224, 320),
    "window_attention backward 16x16 D32 fp32 masked cosine": (448, 304, 280),
    # Cosine attention keeps q and k beside their gradients; 16 warps spill more.
    "window_attention backward 7x7 D32 fp16 masked cosine": (8, 0, 8),
    "window_attention backward 7x7 D32 bf16 masked cosine": (8, 0, 8),
    "window_attention backward 7x7 D64 fp16 masked cosine": (200, 8, 0),
    "window_attention backward 7x7 D64 bf16 masked cosine": (176, 8, 0),
    "window_attention backward 8x8 D64 fp16 masked cosine": (224, 16, 8),
    "window_attention backward 8x8 D64 bf16 masked cosine": (216, 16, 8),
    "window_attention backward 12x12 D32 fp16 masked cosine": (24, 0, 0),
    "window_attention backward 12x12 D32 bf16 masked cosine": (24, 0, 0),
    "window_attention backward 16x16 D32 fp16 masked cosine": (8, 0, 0),
    "window_attention backward 16x16 D32 bf16 masked cosine": (8, 0, 0),
    "window_attention backward 12x12 D64 fp16 masked cosine": (272, 288, 288),
    "window_attention backward 12x12 D64 bf16 masked cosine": (272, 312, 288),
    # The backward pass keeps dk and dv of every token: much for 64 channels, or with dropout. 16 warps spill more.
    "window_attention backward 8x8 D32 fp16 masked dropout": (8, 0, 0),
    "window_attention backward 8x8 D32 bf16 masked dropout": (8, 0, 0),
    "window_attention backward 8x8 D64 fp16 masked": (24, 0, 0),
    "window_attention backward 8x8 D64 bf16 masked": (24, 0, 0),
    "window_attention backward 12x12 D32 fp16 masked dropout": (24, 0, 0),
    "window_attention backward 12x12 D32 bf16 masked dropout": (24, 0, 0),
    "window_attention backward 12x12 D64 fp16 masked": (176, 32, 0),
    "window_attention backward 12x12 D64 bf16 masked": (176, 32, 0),
    "window_attention backward 12x12 D32 fp32 masked tf32": (32, 8, 8),
    "window_attention backward 7x7 D128 fp16 masked": (16, 72, 0),
    # fp64 takes two registers a number.
    "fcos targets whole boxes fp64 in pixels": (8, 0, 0),
}
"""Variant → bytes for compute capability 8.0, 9.0 and 10.0."""

KNOWN_SPILLS = {
    (variant, architecture): stack_bytes
    for variant, row in _STACK_BYTES.items()
    for architecture, stack_bytes in zip((80, 90, 100), row, strict=True)
    if stack_bytes
}
"""Variant and architecture → bytes of stack a thread may have; all others none."""

TOO_LARGE = frozenset(
    {
        ("window_attention backward 12x12 D64 fp32 masked", 80),
        ("window_attention backward 12x12 D64 fp32 masked cosine", 80),
    }
)
"""Variants and architectures that need more shared memory than there is: there such a launch raises."""
