"""What DDP waits for other ranks is communication, and the step is as long as it was."""

from __future__ import annotations

import pytest

from accel.profiler.diagnose.step_times import wait_as_communication
from accel.profiler.phases import Measurement


@pytest.mark.parametrize(("wait_share", "wait"), [(None, 0.0), (0.0, 0.0), (0.25, 1.0), (0.9, 2.0)])
def test_what_ddp_waits_moves_from_backward_to_communication(wait_share: float | None, wait: float) -> None:
    before = Measurement(step=0, seconds=4.0, phases={"forward": 1.5, "backward": 2.0, "communication": 0.5})
    (found,) = wait_as_communication([before], wait_share)
    assert found.phases == {"forward": 1.5, "backward": 2.0 - wait, "communication": 0.5 + wait}
    assert before.phases["backward"] == 2.0
    # A step without backward, as one cut off, has nothing to move.
    assert wait_as_communication([Measurement(step=0, seconds=1.0, phases={"data": 1.0})], 0.5)[0].phases["data"] == 1.0
