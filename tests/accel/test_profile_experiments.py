"""What experiments under `accel profile` leave of a script's training: its bits, and all that is outside the steps."""

from __future__ import annotations

from pathlib import Path

from tests import warm
from tests.accel.profiled import accel_profile, report, script


def test_the_training_is_that_of_the_plain_script_to_the_bit(tmp_path: Path) -> None:
    """Fetching ahead and the like change nothing the model learns."""
    body = """
    def slow(samples):
        time.sleep(0.003)
        return torch.utils.data.default_collate(samples)

    for epoch in range(9):  # 360 steps: 0.6 s are observed before anything is tried
        for x, y in DataLoader(data, batch_size=8, shuffle=True, collate_fn=slow):
            step(x, y)
    print(sum(p.double().sum().item() for p in model.parameters()), torch.rand(1).item())
    """
    script(tmp_path, body)
    done = accel_profile(tmp_path, "train.py")
    plain = warm.run(["train.py"], cwd=tmp_path)

    assert done.stdout == plain.stdout
    assert report(tmp_path).experiments


def test_experiments_stay_within_the_steps(tmp_path: Path) -> None:
    """The collector is itself again between two epochs and after the last, whenever that is."""
    script(
        tmp_path,
        """
        import gc
        kept = [[] for _ in range(50_000)]  # a collection takes some milliseconds
        between, left, began = [], 25, time.monotonic()
        while left:  # a second, in which the profiler has seen enough, and 175 steps more
            for number, (x, y) in enumerate(loader):
                step(x, y)
                gc.collect()
                if number == 6:
                    break
            between.append(gc.isenabled() and gc.collect.__module__ == "gc")
            left -= time.monotonic() - began > 1
        with torch.no_grad():
            print(all(between), gc.isenabled(), tuple(model(data.tensors[0]).shape))
        """,
    )
    done = accel_profile(tmp_path, "train.py")

    assert done.stdout == "True True (320, 2)\n", done.stderr
    assert "no garbage collection" in [tried.name for tried in report(tmp_path).experiments]
