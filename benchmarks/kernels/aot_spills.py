"""What the ahead-of-time gate excuses: spills that neither other tiles nor more warps take away, and why."""

from __future__ import annotations

KNOWN_SPILLS = {
    # IEEE fp32 has no tensor cores, so the operands of a product lie in registers.
    ("window_attention backward 12x12 D16 fp32 masked cosine", 100): 88,
    ("window_attention backward 12x12 D32 fp32 masked", 80): 344,
    ("window_attention backward 12x12 D32 fp32 masked", 90): 240,
    ("window_attention backward 12x12 D32 fp32 masked", 100): 344,
    ("window_attention backward 12x12 D32 fp32 masked cosine", 80): 352,
    ("window_attention backward 12x12 D32 fp32 masked cosine", 90): 216,
    ("window_attention backward 12x12 D32 fp32 masked cosine", 100): 264,
    ("window_attention backward 12x12 D32 fp32 masked dropout", 80): 440,
    ("window_attention backward 12x12 D32 fp32 masked dropout", 90): 312,
    ("window_attention backward 12x12 D32 fp32 masked dropout", 100): 448,
    ("window_attention forward 12x12 D64 fp32 masked", 80): 312,
    ("window_attention forward 12x12 D64 fp32 masked", 90): 312,
    ("window_attention forward 12x12 D64 fp32 masked", 100): 312,
    ("window_attention backward 12x12 D64 fp32 masked", 80): 1440,
    ("window_attention backward 12x12 D64 fp32 masked", 90): 1280,
    ("window_attention backward 12x12 D64 fp32 masked", 100): 88,
    ("window_attention forward 12x12 D64 fp32 masked cosine", 80): 64,
    ("window_attention forward 12x12 D64 fp32 masked cosine", 90): 64,
    ("window_attention forward 12x12 D64 fp32 masked cosine", 100): 64,
    ("window_attention backward 12x12 D64 fp32 masked cosine", 80): 1800,
    ("window_attention backward 12x12 D64 fp32 masked cosine", 90): 1608,
    ("window_attention backward 12x12 D64 fp32 masked cosine", 100): 624,
    ("window_attention backward 16x16 D32 fp32 masked", 80): 296,
    ("window_attention backward 16x16 D32 fp32 masked", 90): 224,
    ("window_attention backward 16x16 D32 fp32 masked", 100): 320,
    ("window_attention backward 16x16 D32 fp32 masked cosine", 80): 448,
    ("window_attention backward 16x16 D32 fp32 masked cosine", 90): 304,
    ("window_attention backward 16x16 D32 fp32 masked cosine", 100): 280,
    # Cosine attention keeps q and k beside their gradients; 16 warps spill more.
    ("window_attention backward 7x7 D32 fp16 masked cosine", 80): 8,
    ("window_attention backward 7x7 D32 fp16 masked cosine", 100): 8,
    ("window_attention backward 7x7 D32 bf16 masked cosine", 80): 8,
    ("window_attention backward 7x7 D32 bf16 masked cosine", 100): 8,
    ("window_attention backward 7x7 D64 fp16 masked cosine", 80): 200,
    ("window_attention backward 7x7 D64 fp16 masked cosine", 90): 8,
    ("window_attention backward 7x7 D64 bf16 masked cosine", 80): 176,
    ("window_attention backward 7x7 D64 bf16 masked cosine", 90): 8,
    ("window_attention backward 8x8 D64 fp16 masked cosine", 80): 224,
    ("window_attention backward 8x8 D64 fp16 masked cosine", 90): 16,
    ("window_attention backward 8x8 D64 fp16 masked cosine", 100): 8,
    ("window_attention backward 8x8 D64 bf16 masked cosine", 80): 216,
    ("window_attention backward 8x8 D64 bf16 masked cosine", 90): 16,
    ("window_attention backward 8x8 D64 bf16 masked cosine", 100): 8,
    ("window_attention backward 12x12 D32 fp16 masked cosine", 80): 24,
    ("window_attention backward 12x12 D32 bf16 masked cosine", 80): 24,
    ("window_attention backward 16x16 D32 fp16 masked cosine", 80): 8,
    ("window_attention backward 16x16 D32 bf16 masked cosine", 80): 8,
    ("window_attention backward 12x12 D64 fp16 masked cosine", 80): 272,
    ("window_attention backward 12x12 D64 fp16 masked cosine", 90): 288,
    ("window_attention backward 12x12 D64 fp16 masked cosine", 100): 288,
    ("window_attention backward 12x12 D64 bf16 masked cosine", 80): 272,
    ("window_attention backward 12x12 D64 bf16 masked cosine", 90): 312,
    ("window_attention backward 12x12 D64 bf16 masked cosine", 100): 288,
    # The backward pass keeps dk and dv of every token: much for 64 channels, or with dropout. 16 warps spill more.
    ("window_attention backward 8x8 D32 fp16 masked dropout", 80): 8,
    ("window_attention backward 8x8 D32 bf16 masked dropout", 80): 8,
    ("window_attention backward 8x8 D64 fp16 masked", 80): 24,
    ("window_attention backward 8x8 D64 bf16 masked", 80): 24,
    ("window_attention backward 12x12 D32 fp16 masked dropout", 80): 24,
    ("window_attention backward 12x12 D32 bf16 masked dropout", 80): 24,
    ("window_attention backward 12x12 D64 fp16 masked", 80): 176,
    ("window_attention backward 12x12 D64 fp16 masked", 90): 32,
    ("window_attention backward 12x12 D64 bf16 masked", 80): 176,
    ("window_attention backward 12x12 D64 bf16 masked", 90): 32,
    ("window_attention backward 12x12 D32 fp32 masked tf32", 80): 32,
    ("window_attention backward 12x12 D32 fp32 masked tf32", 90): 8,
    ("window_attention backward 12x12 D32 fp32 masked tf32", 100): 8,
    ("window_attention backward 7x7 D128 fp16 masked", 80): 16,
    ("window_attention backward 7x7 D128 fp16 masked", 90): 72,
    # fp64 takes two registers a number.
    ("fcos targets whole boxes fp64 in pixels", 80): 8,
}
"""Variant and architecture → bytes of stack a thread may have; all others none."""

TOO_LARGE = frozenset(
    {
        ("window_attention backward 12x12 D64 fp32 masked", 80),
        ("window_attention backward 12x12 D64 fp32 masked cosine", 80),
    }
)
"""Variants and architectures that need more shared memory than there is: there such a launch raises."""
