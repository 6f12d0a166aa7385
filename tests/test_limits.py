"""Limits that shape the design."""

from __future__ import annotations

import ast

import pytest
from click.testing import CliRunner

from benchmarks import structure


@pytest.fixture(scope="module")
def measured() -> structure.Measures:
    return structure.measures()


def test_nothing_is_over_its_limit(measured: structure.Measures) -> None:
    found = structure.breaches(measured)
    assert not found, "\n".join(found)


def test_what_is_over_is_named() -> None:
    within: structure.Measures = {limit: {"a": most} for limit, most in structure.LIMITS.items()}
    assert structure.breaches(within) == []
    assert structure.breaches({**within, "methods": {"Old": 21, "Small": 2}}) == ["Old: 21 methods, at most 15"]


def test_methods_of_a_base_with_one_subclass_are_the_subclass_s_own(measured: structure.Measures) -> None:
    methods = measured["methods"]
    assert methods["Strategy"] < methods["TorchCompile"] or "Strategy" not in methods
    assert methods["StrategyRow"] == 0


def test_members_are_public_attributes_and_methods() -> None:
    tree = ast.parse("class A:\n    name: str\n    _own: int\n    def act(self): ...\n    def _help(self): ...")
    assert isinstance(tree.body[0], ast.ClassDef)
    assert structure.members(tree.body[0]) == {"name", "act"}


def test_depth_counts_the_modules_of_the_longest_way() -> None:
    assert structure.depth({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3


@pytest.mark.parametrize(
    ("source", "owner"),
    [
        ("import torch\ntorch.autograd.backward = mine", "torch.autograd"),
        ("import torch.distributed as dist\ndist.barrier = mine", "torch.distributed"),
        ("from torch import autograd as engine\nsetattr(engine, name, mine)", "torch.autograd"),
        ("from torch.nn import Module\npatches.replace(Module, '__call__', make)", "torch.nn.Module"),
        (
            "from torch.m import register_module_forward_hook as hook\nhook(mine)",
            "torch.m.register_module_forward_hook",
        ),
    ],
)
def test_a_patch_is_seen(source: str, owner: str) -> None:
    assert list(structure.patched(source)) == [owner]


def test_a_setting_is_no_patch() -> None:
    assert not list(structure.patched("import torch\ntorch.backends.cudnn.benchmark = True\nsettings.x = 1"))


@pytest.mark.slow
def test_sizes_are_printed() -> None:
    result = CliRunner().invoke(structure.main)
    assert result.exit_code == 0, result.output
    assert "import depth" in result.output
