"""The rules of the folders: where code stands, what it may import, what `import accel` may do."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

import accel
from benchmarks.source_tree import LINKED, ROOT, import_name, imported, own_files, own_modules, statements, text

FOLDERS = ("accel", *LINKED, "benchmarks", "tests")

# Facts of the host, the statistics of a trial and how ranks agree: loaders and communication may stand on them.
GROUND_FLOOR = {
    *("accel.profiler.cgroup", "accel.profiler.errors", "accel.profiler.host", "accel.profiler.interruptions"),
    *("accel.profiler.nvml", "accel.profiler.renamed", "accel.profiler.rendezvous", "accel.profiler.stderr"),
    *("accel.profiler.torch_threads", "accel.profiler.trees", "accel.profiler.trial", "accel.profiler.trial_driver"),
}

# Folder → the folders, or single modules, that it may import beside its own.
MAY_IMPORT = {
    "kernels": {"accel.profiler.errors"},
    "profiler": set(),
    "comm": {"kernels", *GROUND_FLOOR},
    "dataio": {"kernels", *GROUND_FLOOR},
    "accel": set(LINKED),
    "benchmarks": set(FOLDERS),
    "tests": set(FOLDERS),
}

# A name that goes breaks scripts, and needs an old name for one release: see accel/profiler/renamed.py.
# fmt: off
PUBLIC = [
    "AccelError", "AutoComm", "BatchLimits", "BatchScale", "BatchedSimOTAAssigner", "CheckpointError",
    "Checkpointing", "Checkpoints", "CommError", "CommState", "Compressor", "Configuration", "ContinuousLoader",
    "DGC", "DaliLoader", "Elastic", "ElasticSampler", "Exact", "FSDPComm", "FcosConfig", "FcosGts", "FcosPoints",
    "Half", "ImageDataset", "ImageFolder", "Int8", "InvalidArgument", "InvalidState", "InvalidType", "JobProfile",
    "LearningRateScaler", "LengthBalancedBatchSampler", "LocalJob", "LocalSGD", "NoiseInterval", "NoiseMeter",
    "Normalize", "Observations", "OneBit", "PackCollate", "Plan", "PlanError", "PowerSGD", "ProgressSchedule",
    "RandomResizedCrop", "Report", "ReportError", "Resize", "ResizeCenterCrop", "SampleCache", "SavePolicy",
    "Slice", "SpeedTable", "Stage", "ThroughputModel", "Trial", "TrialConfig", "__version__", "amp", "bernoulli_",
    "capture_state", "collate_images", "compact", "count_tokens", "disabled", "explain", "fcos3d_targets",
    "fcos_targets", "fit_throughput", "fp32_precision", "fuse_window_attention", "gather_rows", "global_tokens",
    "graphs", "hook", "job_profile", "log_batches", "log_report", "measure_links", "optim", "optimize", "outliving",
    "pack", "patch_fcos_head", "patch_yolov7_loss", "patch_yolox_head", "progress_of", "register_compressor",
    "remaining_epochs", "report_score", "request_checkpoint", "reshard", "restore_state", "save_checkpoint",
    "scale_gradients", "scaling_rules", "shifted_window_attention", "simota_assign", "take_momentum", "tar_samples",
    "token_mean", "undo", "unpack", "unpatch_fcos_head", "unpatch_yolov7_loss", "unpatch_yolox_head",
    "window_attention",
]
# fmt: on

FOR_TYPES = {
    (node.module, alias.name)
    for node in statements(ast.parse(text(ROOT / "accel" / "__init__.py")).body)
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel") and node.col_offset
    for alias in node.names
}
"""(module, name) that `accel` imports where TYPE_CHECKING is true."""

# Written so that this file does not match itself.
FORBIDDEN = {
    "path of somebody's machine": re.compile(r"(?<![\w.~-])/(?:work|farm|root|home/\w+|Users/\w+)/"),
    "local package folder": re.compile(r"/opt/(?:wheels|pypi)"),
    "host of a package registry": re.compile(
        r"pypi\.org|pythonhos[t]ed|download\.pytorch\.org|registry\.npmjs|deb\.debian|conda\.anaconda\.org"
    ),
}


def home(name: str) -> str | None:
    """Return the folder that holds the dotted `name`, or None when it is not ours."""
    first, _, rest = name.partition(".")
    second = rest.partition(".")[0]
    if first == "accel":
        return second if second in LINKED else "accel"
    return first if first in ("benchmarks", "tests") else None


def breaches(source: str, module: str) -> list[str]:
    """Return one sentence for each import in `source` that the table does not allow."""
    folder = home(module)
    assert folder is not None
    found = []
    for line, name in imported(source, module):
        target = home(name)
        if name.partition(".")[0] in LINKED:
            found.append(f"{module}:{line} imports {name}; write accel.{name}")
        elif target is not None and target != folder and not allowed(name, target, MAY_IMPORT[folder]):
            found.append(f"{module}:{line} imports {name}, but {folder}/ may not import {target}/")
    return found


def allowed(name: str, target: str, table: set[str]) -> bool:
    """Tell whether `table` holds `target`, the folder of the dotted `name`, or the module that `name` is of."""
    return target in table or any(f"{name}.".startswith(f"{module}.") for module in table if "." in module)


def run_bare(code: str, *arguments: str | Path) -> str:
    """Run `code` where only the standard library is installed, so that the checkout is all there is to find."""
    command = [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


# The folders


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_reaches_the_top_level_folder(name: str) -> None:
    link = ROOT / "accel" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert link.is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_linked_folder_has_no_init(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists()


def test_packages_are_listed_under_their_import_names() -> None:
    packages = set(find_namespace_packages(str(ROOT), include=["accel", "accel.*"]))
    assert {"accel", *(f"accel.{name}" for name in LINKED)} <= packages
    assert not packages & {*LINKED, "benchmarks", "tests"}


@pytest.mark.parametrize("name", [folder for folder in FOLDERS if folder != "tests"])
def test_folder_that_holds_code_has_tests_of_its_own(name: str) -> None:
    code = [path for path in own_modules(name) if path.name != "__init__.py"]
    if code:
        assert list((ROOT / "tests" / name).rglob("test_*.py")), f"{name}/ holds code, but tests/{name}/ holds no test"


@pytest.mark.parametrize("name", LINKED)
def test_checkout_on_the_path_offers_no_regular_package(name: str) -> None:
    code = (
        "import importlib.util, json, sys; sys.path.insert(0, sys.argv[1]); s = importlib.util.find_spec(sys.argv[2]);"
        "print(json.dumps([s.origin, list(s.submodule_search_locations)]))"
    )
    origin, locations = json.loads(run_bare(code, ROOT, name))
    assert origin is None
    assert locations == [str(ROOT / name)]


@pytest.mark.parametrize("name", LINKED)
def test_checkout_on_the_path_does_not_shadow_another_package(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / name / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    code = "import sys; sys.path[:0] = sys.argv[1:3]; print(__import__(sys.argv[3]).__file__)"
    assert run_bare(code, ROOT, tmp_path, name).strip() == str(theirs)


# The import table


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_the_table_allows(folder: str) -> None:
    found = [
        breach
        for path in own_modules(folder)
        for breach in breaches(path.read_text(encoding="utf-8"), import_name(path))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("accel.kernels.adam", "import accel"),
        ("accel.kernels.adam", "from accel import comm"),
        ("accel.kernels.adam", "from .. import errors"),
        ("accel.profiler.trial", "def f():\n    from accel.errors import AccelError"),
        ("accel.profiler.trial", "from importlib import import_module\nimport_module('accel.kernels.adam')"),
        ("accel.profiler.trial", "from ..kernels import adam"),
        ("accel.comm.hooks", "from accel.dataio import pack"),
        ("accel.dataio.pack", "import accel.profiler.conclusion.verdict"),
        ("accel.dataio.pack", "import accel.profiler.hosts"),
        ("accel.comm.hooks", "from accel.profiler import session"),
        ("accel.kernels.adam", "from accel.profiler.host import usable_cores"),
        ("accel.entry", "from benchmarks import loops"),
        ("accel.entry", "import tests.conftest"),
        ("tests.comm.test_hooks", "from comm import hooks"),
    ],
)
def test_breach_of_the_table_is_found(module: str, source: str) -> None:
    assert len(breaches(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "accel.kernels.adam",
            "import torch\nfrom . import norm\nfrom .norm import op\nfrom accel.kernels import norm",
        ),
        ("accel.comm.hooks", "from accel.kernels.norm import op\nfrom ..kernels import norm\nfrom . import cost"),
        ("accel.entry", "from accel.search import plan\nfrom accel.profiler.trial import Trial\nimport accel.comm"),
        ("accel.strategies.fused", "from ..errors import AccelError\nfrom .base import Strategy"),
        ("accel.dataio.pack", "import accel.profiler.trial\nfrom accel.profiler.host import usable_cores"),
        ("benchmarks.run", "import accel\nfrom accel.dataio import pack\nfrom benchmarks import loops"),
        ("tests.accel.test_entry", "from benchmarks import loops\nfrom accel.kernels import norm"),
        ("accel.comm.hooks", "import dataclasses\nimport commctrl\nimport profile"),
    ],
)
def test_import_that_the_table_allows_passes(module: str, source: str) -> None:
    assert breaches(source, module) == []


def test_cores_are_counted_in_one_place() -> None:
    """Whoever counts again forgets the control group's quota."""
    counts = re.compile(r"sched_getaffinity|cpu_count|process_cpu_count")
    found = {
        str(path.relative_to(ROOT))
        for folder in ("accel", *LINKED)
        for path in own_modules(folder)
        if counts.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"profiler/host.py"}


def test_hooks_of_tensors_are_registered_in_one_place() -> None:
    """Whoever registers one alone forgets that autograd calls it with None where no gradient arrives."""
    found = {
        str(path.relative_to(ROOT))
        for folder in ("accel", *LINKED)
        for path in own_modules(folder)
        if ".register_hook(" in path.read_text(encoding="utf-8")
    }
    assert found == {"profiler/loop/backward.py"}


# `import accel`


def test_public_names_are_locked_and_sorted() -> None:
    assert accel.__all__ == PUBLIC
    assert accel.__all__ == sorted(accel.__all__)
    assert dir(accel) == PUBLIC


@pytest.mark.parametrize("name", sorted({*PUBLIC} - {"__version__"}))
def test_public_name_is_the_one_that_type_checkers_see(name: str) -> None:
    home = accel._HOMES.get(name)
    if home is None:
        assert getattr(accel, name) is importlib.import_module(accel._MODULES[name])
        assert (accel._MODULES[name].removesuffix(f".{name}"), name) in FOR_TYPES
    else:
        assert getattr(accel, name) is getattr(importlib.import_module(home), name)
        assert (home, name) in FOR_TYPES


def test_type_checkers_see_no_other_names() -> None:
    assert {name for _, name in FOR_TYPES} == set(PUBLIC) - {"__version__"}


def test_unknown_name_is_refused_with_the_one_that_was_meant_or_all() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'optimise'; did you mean accel\.optimize\?$"):
        _ = accel.optimise
    with pytest.raises(AttributeError, match=r"no attribute 'launch'; public names: AccelError, .*, undo"):
        _ = accel.launch


def test_import_of_accel_loads_nothing_beside_the_standard_library() -> None:
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import accel;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)))"
    )
    assert json.loads(run_bare(code, ROOT)) == ["__main__", "accel"]


def test_import_of_accel_leaves_torch_out_even_where_it_is_installed() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import accel; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(ROOT)]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "False\n"


def test_import_of_accel_does_no_work() -> None:
    code = (
        "import json, logging, os, sys, threading, warnings; sys.path.insert(0, sys.argv[1]);"
        "state = lambda: [dict(os.environ), list(sys.path), list(logging.root.handlers), len(warnings.filters),"
        " threading.active_count(), sorted(logging.root.manager.loggerDict)];"
        "before = state(); import accel; print(before == state())"
    )
    assert run_bare(code, ROOT) == "True\n"


# What may not be written anywhere


def test_no_file_names_a_machine_path_or_a_registry() -> None:
    found = []
    for path in own_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture or an archive
        found += [
            f"{path.relative_to(ROOT)}:{number} holds a {what}"
            for number, line in enumerate(lines, start=1)
            for what, pattern in FORBIDDEN.items()
            if pattern.search(line)
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["work", "root", "home/someone"])
def test_machine_path_is_recognised(folder: str) -> None:
    pattern = FORBIDDEN["path of somebody's machine"]
    assert pattern.search(f"see /{folder}/train.py")
    assert not pattern.search(f"https://example.org/{folder}/train.py")
    assert not pattern.search(f"../{folder}/train.py")
