"""Fill the marked blocks of README.md and the manual from committed results: no figure is typed by hand.

    python -m benchmarks.readme [--check]

The newest file of each kind under benchmarks/results/ is used; `--check` changes nothing and exits with 1 if a page is
out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from accel.files import write_atomic
from benchmarks import proof, tables, tables_comm, tables_loading

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"


def newest(pattern: str) -> dict[str, Any] | None:
    """Return the newest result file that matches, by its date."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(_RESULTS.glob(pattern))]
    return max(found, key=lambda result: result["date"]) if found else None


Make = Callable[[], str | None]


def _from(pattern: str, table: Callable[[dict[str, Any]], str]) -> Make:
    def make() -> str | None:
        result = newest(pattern)
        return None if result is None else table(result)

    return make


BLOCKS: dict[str, dict[str, Make]] = {
    "README.md": {
        "demo": _from("demo-*.json", tables.demo_block),
        "proof": lambda: proof.proof_block(newest),
    },
    "docs/controller.md": {"table": _from("never-slower-reordered-*.json", tables.table_block)},
    "docs/profiler.md": {"faults": _from("fault-matrix-cpu-*.json", tables.faults_block)},
    "docs/loader.md": {"loaders": _from("loaders-cpu-*.json", tables_loading.loaders_block)},
    "docs/samplers.md": {"lengths": _from("length-balance-cpu-*.json", tables_loading.lengths_block)},
    "docs/images.md": {"jpeg": _from("jpeg-cpu-*.json", tables_loading.jpeg_block)},
    "docs/comm_figures.md": {
        "hooks": _from("comm-hooks-cpu-*.json", tables_comm.hooks_block),
        "launches": _from("comm-launches-cpu-*.json", tables_comm.launches_block),
        "costs": _from("compressor-costs-cpu-*.json", tables_comm.costs_block),
        "choice": _from("comm-choice-cpu-*.json", tables_comm.choice_block),
        "accuracy": _from("comm-accuracy-cpu-*.json", tables_comm.accuracy_block),
    },
    "docs/kernels.md": {
        "simota": _from("simota-cpu-*.json", tables.simota_block),
        "fcos": _from("fcos-targets-cpu-*.json", tables.fcos_block),
    },
}
"""Page → its blocks: name, and what makes its text; None where there is no result yet."""


def filled(page: str, text: str) -> str:
    """Return a page with its blocks filled; a block without results stays as it is."""
    for name, make in BLOCKS[page].items():
        made = make()
        if made is not None:
            begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
            text = text[: text.index(begin)] + f"{begin}\n{made}\n" + text[text.index(end) :]
    return text


@click.command()
@click.option("--check", is_flag=True, help="Exit with 1 if a page is out of date.")
def main(check: bool) -> None:
    """Fill the pages' figures."""
    old = {page: (_ROOT / page).read_text(encoding="utf-8") for page in BLOCKS}
    new = {page: filled(page, text) for page, text in old.items()}
    if check:
        sys.exit(old != new)
    for page, text in new.items():
        write_atomic(_ROOT / page, text)


if __name__ == "__main__":
    main()
