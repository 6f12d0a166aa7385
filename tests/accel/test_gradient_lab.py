"""The strategies for gradients on a link that is really slow: two network namespaces, one line in the loop."""

from __future__ import annotations

import json

import pytest

from benchmarks.comm.lab import Lab, why_not

pytestmark = [pytest.mark.slow, pytest.mark.net, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def test_gradients_are_compressed_on_a_slow_link() -> None:
    with Lab(2, "100mbit") as lab:
        output = lab.run(["-m", "tests.accel.gradient_lab_worker"], 1, timeout_s=150)[0].output
    found = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[7:])
    assert found["status"] == "kept", found
    assert found["gain"] > 1.5  # 4 MB of gradients at 100 Mbit/s take a third of a second as they are
    assert "predicted" in found["setting"]
    assert found["same"]
