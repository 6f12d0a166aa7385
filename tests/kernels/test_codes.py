"""What holds for both codes by blocks, eight bits and signs: sums, memory that is shared, limits, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel.kernels import quantise, sign_pack
from tests.kernels.code_cases import (
    BLOCKS,
    decoded,
    encoded,
    on_gpu,
    refused,
    rows,
    same_bits,
    summed,
    values_of,
)
from tests.kernels.contract import opcheck

CODES = {"quantise": quantise, "sign_pack": sign_pack}
both = pytest.mark.parametrize("code", CODES.values(), ids=CODES)
quiet = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of infinities and NaN


@both
def test_lost_may_be_the_residual_and_need_not_be_asked_for(interpreted: None, code: Any) -> None:
    values, residual = values_of(2049), values_of(2049, 1)
    bytes_, left = encoded(code, values, 64, residual)
    out = torch.empty_like(bytes_)
    code.encode(values, out, 64, residual, residual)
    assert torch.equal(out, bytes_)
    assert same_bits(residual, left)
    out.fill_(255)
    code.encode(values, out, 64)
    assert torch.equal(out, encoded(code, values, 64)[0])


@both
@quiet
@pytest.mark.sample(8)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 64, 199])
def test_what_is_not_finite_stays_so_in_its_block_alone(bad: float, place: int, path: str, code: Any) -> None:
    values = torch.ones(200)
    values[place] = bad
    found, lost = encoded(code, values, 64)
    own = torch.arange(200) // 64 == place // 64
    out = decoded(code, found[None], 200, 64)
    assert not out[own].isfinite().any()
    assert not lost[own].isfinite().any()
    torch.testing.assert_close(out[~own] + lost[~own], values[~own])


@both
@pytest.mark.sample(8)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", [0, 1, 65, 2049, 5003])
def test_kernel_sums_in_rank_order(interpreted: None, size: int, block: int, ranks: int, code: Any) -> None:
    codes = rows(code, [values_of(size, seed) for seed in range(ranks)], block)
    for start in (None, values_of(size, 9)):
        found = decoded(code, codes, size, block, start)
        if size:
            assert same_bits(found, summed(code, codes, size, block, start))


@pytest.mark.parametrize(
    ("code", "change", "reason"),
    [
        *((code, *case) for code in CODES.values() for case in refused(code)),
        (sign_pack, {"block": 12}, "block must be a positive multiple of 8 elements. Found: 12"),
    ],
)
def test_what_does_not_fit_is_refused(code: Any, change: dict[str, Any], reason: str) -> None:
    call = {"values": torch.zeros(8), "encoded": torch.empty(code.encoded_bytes(8, 8), dtype=torch.uint8), "block": 8}
    code.encode(**call)
    with pytest.raises(ValueError, match=reason):
        code.encode(**{**call, **change})


@both
def test_ops_keep_their_contract_and_compile(code: Any) -> None:
    values, size = values_of(100), code.encoded_bytes(100, 64)
    opcheck(
        code.CODE.encode_op, (values, torch.zeros(size, dtype=torch.uint8), 64, values.clone(), torch.zeros(100), 0.5)
    )
    opcheck(code.CODE.decode_sum_op, (rows(code, [values, values], 64), torch.zeros(100), 64, True))

    def there_and_back(values: Tensor) -> Tensor:
        encoded, out = values.new_empty(size, dtype=torch.uint8), torch.empty_like(values)
        code.encode(values, encoded, 64)
        code.decode_sum(encoded[None], out, 64)
        return out

    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(values), there_and_back(values))


@both
@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2049, (1 << 20) + 3])
def test_gpu_sums_as_the_reference(size: int, code: Any) -> None:
    codes, start = rows(code, [values_of(size, seed) for seed in range(7)], 1024), values_of(size, 9)
    found = [decoded(code, on_gpu(codes), size, 1024, start.cuda()).cpu() for _ in range(2)]
    assert same_bits(found[0], summed(code, codes, size, 1024, start))
    assert same_bits(found[0], found[1])
