"""One switch for TF32: whatever was set before, every one of torch's ways can be read, and all is put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.precision import fp32_precision
from tests import warm

# Each in a process of its own: the switches are the process's, and some states can't be left again.
_SCRIPT = """
import os, sys, torch
from accel.precision import allows_tf32, fp32_precision

b = torch.backends
READERS = {
    "get": torch.get_float32_matmul_precision,
    "matmul.allow": lambda: b.cuda.matmul.allow_tf32,
    "cudnn.allow": lambda: b.cudnn.allow_tf32,
    "matmul": lambda: b.cuda.matmul.fp32_precision,
    "conv": lambda: b.cudnn.conv.fp32_precision,
    "rnn": lambda: b.cudnn.rnn.fp32_precision,
    "host": lambda: b.mkldnn.matmul.fp32_precision,
}


def read():
    outcome = {}
    for name, reader in READERS.items():
        try:
            outcome[name] = reader()
        except RuntimeError:
            outcome[name] = "raises"
    return outcome


STATES = {
    "nothing": "pass",
    "high": "torch.set_float32_matmul_precision('high')",
    "medium": "torch.set_float32_matmul_precision('medium')",
    "allowed": "b.cuda.matmul.allow_tf32 = True",
    "not for convolutions": "b.cudnn.allow_tf32 = False",
    "new, matmul": "b.cuda.matmul.fp32_precision = 'tf32'",
    "new, matmul ieee": "b.cuda.matmul.fp32_precision = 'ieee'",
    "new over old": "torch.set_float32_matmul_precision('high'); b.cuda.matmul.fp32_precision = 'ieee'",
    "new, conv": "b.cudnn.conv.fp32_precision = 'ieee'",
    "new, conv and rnn": "b.cudnn.conv.fp32_precision = b.cudnn.rnn.fp32_precision = 'ieee'",
    "host": "b.mkldnn.matmul.fp32_precision = 'bf16'",
}
failed = []
for name, code in STATES.items():
    child = os.fork()
    if child:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            failed.append(name)
        continue
    exec(code)
    before = read()
    for matmul, convolutions in (("tf32", None), ("ieee", None), ("tf32", "ieee"), ("ieee", "tf32")):
        with fp32_precision(matmul, convolutions):
            within = read()
            assert within["matmul"] == matmul, within
            wanted = {"tf32"} if (convolutions or matmul) == "tf32" else {"ieee", "none"}
            assert {within["conv"], within["rnn"]} <= wanted, within
            # The host's own precision, set by the new way alone, keeps this one from being read, as it did before.
            assert "raises" not in within.values() or (name, before["get"]) == ("host", "raises"), within
            assert (within["matmul.allow"], within["cudnn.allow"]) == (matmul == "tf32", wanted == {"tf32"})
            assert within["host"] == (before["host"] if matmul == "tf32" else "ieee"), within
            assert allows_tf32() == (matmul == within["conv"] == "tf32")
        assert read() == before, (name, before, read())
    os._exit(0)
print(failed)
"""


def test_all_ways_can_be_read_and_all_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = warm.run(["script.py"], cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"matmul must be \"ieee\" or \"tf32\". Found: 'high'"):
        fp32_precision("high")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"convolutions must be .* Found: 'bf16'"):
        fp32_precision("tf32", "bf16")  # type: ignore[arg-type]
