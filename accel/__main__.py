"""`python -m accel` is the `accel` command."""

from __future__ import annotations

from accel.cli import main

if __name__ == "__main__":
    main(prog_name="accel")
