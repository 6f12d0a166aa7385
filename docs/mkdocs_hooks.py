"""Fit the manual to a site: API pages from docstrings, and no links to files of the checkout that the site lacks."""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

API = {
    "accel": ["accel", "accel.precision", "accel.errors"],
    "amp": ["accel.amp"],
    "graphs": ["accel.graphs"],
    "optim": ["accel.optim"],
    "elastic": [
        "accel.elastic.checkpoint",
        "accel.elastic.checkpointing",
        "accel.elastic.learning_rate",
        "accel.elastic.local_job",
        "accel.elastic.progress",
        "accel.elastic.running",
        "accel.elastic.sample_position",
        "accel.elastic.save_policy",
        "accel.elastic.scaling_rules",
        "accel.elastic.training_state",
        "accel.elastic.worker_signals",
    ],
    "goodput": [
        "accel.goodput.efficiency",
        "accel.goodput.fit",
        "accel.goodput.goodput",
        "accel.goodput.job",
        "accel.goodput.noise_meter",
        "accel.goodput.observations",
        "accel.goodput.throughput",
    ],
    "integrations": [
        "accel.integrations.lightning",
        "accel.integrations.trackers",
        "accel.integrations.transformers",
    ],
    "comm": [
        "accel.comm.hooks",
        "accel.comm.selector",
        "accel.comm.int8",
        "accel.comm.half",
        "accel.comm.one_bit",
        "accel.comm.powersgd",
        "accel.comm.dgc",
        "accel.comm.sgd_momentum",
        "accel.comm.local_sgd",
        "accel.comm.fsdp",
        "accel.comm.compressor",
        "accel.comm.catalogue",
        "accel.comm.layout.between",
        "accel.comm.memory.reshard",
        "accel.comm.bandwidth",
    ],
    "dataio": [
        "accel.dataio.loader",
        "accel.dataio.sample_cache",
        "accel.dataio.images",
        "accel.dataio.image_geometry",
        "accel.dataio.image_normalize",
        "accel.dataio.dali",
        "accel.dataio.length_balance",
        "accel.dataio.elastic_sampler",
        "accel.dataio.packing",
        "accel.dataio.token_loss",
        "accel.dataio.peek",
    ],
    "kernels": [
        "accel.kernels.bernoulli",
        "accel.kernels.compact",
        "accel.kernels.fcos_heads",
        "accel.kernels.fcos_targets",
        "accel.kernels.gather_rows",
        "accel.kernels.quantise",
        "accel.kernels.sign_pack",
        "accel.kernels.simota",
        "accel.kernels.simota_heads",
        "accel.kernels.simota_yolov7",
        "accel.kernels.threshold",
        "accel.kernels.window_attention",
        "accel.kernels.window_dropins",
    ],
}
"""API page → the public modules on it. tests/test_site.py compares them with the imports that the manual shows."""

_LINK = re.compile(r"\[([^\]\n]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_startup(command: str, dirty: bool) -> None:
    """Copy the library for mkdocstrings: its reader follows no links and wants an `__init__.py` in each folder."""
    root = Path(__file__).parents[1]
    copy = root / "build" / "api" / "accel"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(root / "accel", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*.py"):  # the reader takes doctests for code under "Examples:" only
        path.write_text(path.read_text(encoding="utf-8").replace(" Example:\n", " Examples:\n"), encoding="utf-8")
    for folder in {path.parent for path in copy.rglob("*.py")}:
        (folder / "__init__.py").touch()


def on_files(files: Any, config: Any) -> Any:
    """Add a page of the Python API for each row of `API`."""
    from mkdocs.structure.files import File

    for name, modules in API.items():
        content = f"# {modules[0] if len(modules) == 1 or name == 'accel' else f'accel.{name}'}\n\n"
        content += "\n\n".join(f"::: {module}" for module in modules) + "\n"
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files that the site lacks into their text, and drop the tag that makes tests run code."""

    def shown(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        return link[1] if target.startswith("..") else link[0]

    return _LINK.sub(shown, markdown.replace("```python run\n", "```python\n"))
