"""The benchmark of gradient kernels: its cases are right, here on a CPU, and a wrong one is not timed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from accel.kernels import quantise, sign_pack
from accel.kernels.codes.block_code import BlockCode
from benchmarks import gradient_kernels
from benchmarks.kernels import code_rivals

CASES = {case.name: case for case in gradient_kernels.cases("cpu", 70_001)}


def test_every_op_has_a_case() -> None:
    words = (
        "int8 encode",
        "int8 sum",
        "int8 decode",
        "1-bit encode",
        "1-bit sum",
        "1-bit decode",
        "maxima",
        "at least",
    )
    assert [any(word in name for name in CASES) for word in (*words, "largest")] == [True] * (len(words) + 1)


@pytest.mark.parametrize("name", CASES)
def test_case_is_right_and_its_rivals_run(name: str) -> None:
    case = CASES[name]
    assert case.right()
    assert case.rivals
    for call in case.rivals.values():
        call()
    assert case.right()
    assert case.cost.bytes > 0


@pytest.mark.parametrize(("bits", "code"), [(8, quantise.CODE), (1, sign_pack.CODE)])
@pytest.mark.parametrize("numel", [1024, 3001])  # whole blocks, and a last one that is not
def test_whole_tensors_are_encoded_and_summed_alike(bits: int, code: BlockCode, numel: int) -> None:
    values, residual = torch.randn(2, numel, generator=torch.Generator().manual_seed(0))
    values[:2048] *= torch.arange(len(values[:2048])) > 1023  # a block of zeros
    size, lost = code.encoded_bytes(numel, code.block), torch.empty(numel)
    encoded = torch.empty(2, -(-size // 16) * 16, dtype=torch.uint8)[:, :size]
    for row in encoded:
        code.encode_ref(values, row, code.block, residual, lost)
    scales, codes, whole_lost = code_rivals.encode(bits, values, residual, code.block)
    torch.testing.assert_close(scales, code.scales(encoded[0], numel, code.block))
    assert (codes != encoded[0, 4 * len(scales) :]).sum() <= 2  # of values that are halfway
    torch.testing.assert_close(whole_lost.abs().sum(), lost.abs().sum(), rtol=1e-4, atol=0)
    total = torch.empty(numel)
    code.decode_sum_ref(encoded, total, code.block)
    torch.testing.assert_close(code_rivals.decode_sum(bits, encoded, numel, code.block), total)


def test_what_is_wrong_is_not_timed() -> None:
    wrong = dataclasses.replace(CASES["int8 encode"], right=lambda: False)
    assert "wrong" in gradient_kernels._row(wrong, 1e12)["failed"]
