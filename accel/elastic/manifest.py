"""What a checkpoint says of itself: how long its file is, its SHA-256, and where in the training it was taken."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

VERSION = 1
_LONGEST = 65536  # bytes; ours have 200


@dataclass(frozen=True)
class Manifest:
    """The facts that are checked before a checkpoint is loaded.

    Args:
        size_bytes: of the state's file.
        sha256: of it, in hexadecimal digits.
        step: of the training.
        world_size: ranks that it was taken with.
        version: of the format.
    """

    size_bytes: int
    sha256: str
    step: int
    world_size: int
    version: int = VERSION

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read it from text.

        Raises:
            ValueError: if it is not a manifest, or of a version that is not known here.
        """
        try:
            values = json.loads(text) if len(text) <= _LONGEST else None
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ValueError("its manifest is no JSON object")
        if values.get("version") != VERSION:
            raise ValueError(f"its manifest has version {values.get('version')!r}, and {VERSION} is known here")
        kinds = {"size_bytes": int, "sha256": str, "step": int, "world_size": int, "version": int}
        for name, kind in kinds.items():
            if type(values.get(name)) is not kind:
                raise ValueError(f"its manifest has no {kind.__name__} {name!r}")
        return cls(**{name: values[name] for name in kinds})
