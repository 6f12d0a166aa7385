"""How good a training is, for `accel tune`: the script says it, the tuner reads it beside the checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

from accel.errors import InvalidArgument

CHECKPOINT = "ACCEL_CHECKPOINT"
"""Variable in which a script that runs as a job finds the folder of its checkpoints."""
_FILE = "scores.jsonl"


def report_score(value: float, step: int) -> None:
    """Tell `accel tune` how good the training is after a step or an epoch.

    Only rank 0 writes; a script that is not a job does nothing here.

    Args:
        value: what is minimised or maximised, such as a validation loss; NaN ends the trial.
        step: number of the step or epoch, the same unit in each trial, ≥ 0.

    Raises:
        InvalidArgument: if `step` is negative.

    Example:
        >>> for epoch in range(2):
        ...     report_score(1.0 / (epoch + 1), epoch)
    """
    if step < 0:
        raise InvalidArgument(f"step must be at least 0. Found: {step}")
    folder = os.environ.get(CHECKPOINT)
    if folder is None or os.environ.get("RANK", "0") != "0":
        return
    path = Path(folder) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": int(step), "value": float(value)}) + "\n")


def read_scores(folder: str | os.PathLike[str]) -> dict[int, float]:
    """Return the scores of a job by step; of a step that was trained again after a restart, the last one.

    Args:
        folder: of its checkpoints.
    """
    path = Path(folder) / _FILE
    if not path.exists():
        return {}
    scores: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:  # the last may be half written
        try:
            entry = json.loads(line)
            scores[int(entry["step"])] = float(entry["value"])
        except (ValueError, TypeError, KeyError):  # cut off by a kill: a restart writes the step again
            continue
    return scores
