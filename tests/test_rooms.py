"""The rooms of the five folders: where a module stands, which way imports go, and which names have a door."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest

from benchmarks.source_tree import LINKED, ROOT, imported_modules, library, own_modules, text

# Folder → its rooms. CONTRIBUTING.md says what each is for. A module outside of all rooms is public.
ROOMS = {
    "accel": {
        "amp",
        "cache",
        "cluster",
        "commands",
        "compile",
        *("elastic", "elastic/batch_size", "elastic/saving"),
        "goodput",
        "graphs",
        "guard",
        "integrations",
        "optim",
        "report",
        "run",
        "script",
        "search",
        "session",
        "strategies",
    },
    "comm": {
        *("bandwidth", "compression", "cost_model", "doctor", "engine", "periodic", "ranks", "selection"),
    },
    "dataio": {"dataset", "engine", "fetching", "image", "passes", "samples", "sampling"},
    "kernels": {"codes", "draws", "fcos_targets", "optimizers", "rows", "simota", "window_attention"},
    "profiler": {"conclusion", "diagnose", "experiments", "loop", "system", "trace"},
}

# Rooms whose names are public too: `__init__` has them in `__all__`, and other folders import them there.
DOORS = {
    *("accel.comm.bandwidth", "accel.comm.doctor"),
    *("accel.kernels.fcos_targets", "accel.kernels.optimizers", "accel.kernels.simota"),
    *("accel.kernels.window_attention", "accel.amp", "accel.graphs", "accel.optim"),
    *("accel.report", "accel.run", "accel.strategies"),
}

MODULES = library()


def folder_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LINKED else "accel"


def room_of(module: str) -> str:
    """Return the package that a module stands in, or the module itself where it is public."""
    folder = folder_of(module)
    base = 1 if folder == "accel" else 2
    parts = module.split(".")
    return ".".join(parts[: base + 1]) if parts[base:] and parts[base] in ROOMS[folder] else module


def circles(sources: dict[str, str]) -> list[str]:
    """Return the rooms of a circle of imports, none if there is no circle."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, source in sources.items():
        targets = {room_of(target) for _, target, _ in imported_modules(source, module, at_import=True)}
        graph[room_of(module)] |= targets - {room_of(module), "accel"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def around_a_door(source: str, module: str) -> list[str]:
    """Return a sentence for each import from another folder of what stands behind a door."""
    return [
        f"{module}:{line} imports {target}; take {name or target} from {room_of(target)}"
        for line, target, name in imported_modules(source, module)
        if room_of(target) in DOORS and target != room_of(target) and folder_of(target) != folder_of(module)
    ]


def classes(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("folder", ROOMS)
def test_each_package_is_a_room_of_the_table(folder: str) -> None:
    packages = {path.parent for path in own_modules(folder)} - {ROOT / folder}
    assert {path.relative_to(ROOT / folder).as_posix() for path in packages} == ROOMS[folder]
    assert not {path.parent for path in own_modules(folder) if not (path.parent / "__init__.py").exists()} - {
        ROOT / folder
    }


def test_rooms_import_each_other_in_one_direction() -> None:
    assert not circles({module: text(path) for module, path in MODULES.items()})


def test_a_circle_is_seen() -> None:
    there, back = "import accel.comm.engine.pipeline", "from accel.comm.ranks import topology"
    assert circles({"accel.comm.ranks.channel": there, "accel.comm.engine.pipeline": back})
    later = f"def when_needed():\n    {there}"
    assert not circles({"accel.comm.ranks.channel": later, "accel.comm.engine.pipeline": back})


def test_doors_are_the_packages_that_say_what_is_public() -> None:
    assert {name for name, path in MODULES.items() if path.name == "__init__.py" and "__all__" in text(path)} == {
        "accel",
        *DOORS,
    }


@pytest.mark.parametrize("folder", ROOMS)
def test_other_folders_come_in_by_the_door(folder: str) -> None:
    found = [
        sentence
        for module, path in MODULES.items()
        if folder_of(module) == folder
        for sentence in around_a_door(text(path), module)
    ]
    assert not found, "\n".join(found)


def test_a_way_around_a_door_is_seen() -> None:
    beside = "from accel.kernels.simota.inputs import Rules"
    assert around_a_door(beside, "accel.comm.hooks")
    assert not around_a_door(beside, "accel.kernels.simota_heads")
    assert not around_a_door("from accel.kernels.simota import Rules", "accel.comm.hooks")


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for name in classes(text(path)):
            if not name.startswith("_"):
                places[name].append(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_torch_s_entry_points_of_a_loop_are_patched_in_one_room() -> None:
    """A loop that is new to accel is then taught in one place, and known to all who subscribe there."""
    patched = re.compile(r"replace\((DataLoader|_BaseDataLoaderIter|torch\.autograd)|torch\.autograd\.backward = ")
    rooms = {room_of(module) for module, path in MODULES.items() if patched.search(text(path))}
    assert rooms == {"accel.profiler.loop"}
