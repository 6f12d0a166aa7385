"""A kept plan as a diff of the script: what is written runs alone, the rest is named with the reason."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.profiler.loop.optimizers import Optimizers
from accel.run.context import Observed
from accel.script import patch
from accel.script.patch import ModelPlan, ScriptPatch, patch_script
from accel.strategies import names

SCRIPT = textwrap.dedent(
    """\
    import torch
    from torch import nn, optim
    from torch.utils.data import DataLoader, TensorDataset


    def train(model, batches, optimizer):
        for x, y in batches:
            optimizer.zero_grad()
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
        return loss.item()


    def main():
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(4, (24,)))
        batches = DataLoader(
            data,
            batch_size=8,
        )
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 4))
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        print("größer", train(model, batches, optimizer))


    main()
    """
)
EVERY = {
    "channels_last": None,
    "autocast_bf16": None,
    "fused_optimizer": "fused",
    "loader_workers": 0,
    "pin_memory": None,
    "tf32": None,
    "flush_denormal": None,
    "cudnn_benchmark": None,
    "intraop_threads": 1,
}


def patch_one(source: str, choices: dict[str, Any], optimizer: str = "AdamW", device: str = "cpu") -> ScriptPatch:
    return patch_script(source, "train.py", [ModelPlan(choices, "Sequential", optimizer, device)])


def patched(folder: Path, choices: dict[str, Any], source: str = SCRIPT, *, device: str = "cpu") -> str:
    """Return the script after `patch` has applied its diff, and check that -R takes it back."""
    found = patch_one(source, choices, device=device)
    assert found.written == list(choices) and not found.left
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    script = folder / "train.py"
    script.write_text(source, encoding="utf-8")
    for options, wanted in ((["-p1"], None), (["-p1", "-R"], source)):
        subprocess.run(["patch", "-s", *options], input=found.diff, text=True, cwd=folder, check=True, encoding="utf-8")
        text = script.read_text(encoding="utf-8")
        if wanted is None:
            changed = text
        else:
            assert text == wanted
    return changed


def printed(source: str) -> float:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
    return float(out.getvalue().split()[1])


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_a_whole_plan_is_written_applied_run_and_taken_back(tmp_path: Path) -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        text = patched(tmp_path, EVERY)
        assert printed(text) == pytest.approx(printed(SCRIPT), rel=0.02)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_flush_denormal(False)
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ({"channels_last": None}, "    model.to(memory_format=torch.channels_last)\n    optimizer = "),
        ({"torch_compile": "whole model"}, "    model.compile()\n    optimizer = "),
        ({"fused_optimizer": "foreach"}, "optim.AdamW(model.parameters(), lr=1e-3, foreach=True)"),
        ({"loader_workers": 2}, "batch_size=8, num_workers=2,\n"),
        ({"pin_memory": None}, "batch_size=8, pin_memory=True,\n"),
        (
            {"autocast_bf16": None},
            '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            out = model(x)\n',
        ),
        ({"autocast_bf16": None}, "            out = model(x)\n        out = out.float()\n"),
        ({"allocator": None}, "TensorDataset\nimport ctypes\nctypes.CDLL(None).mallopt(-4, 0)"),
        ({"intraop_threads": 1}, "TensorDataset\ntorch.set_num_threads(1)\n"),
    ],
)
def test_each_strategy_is_one_change(tmp_path: Path, choices: dict[str, Any], line: str) -> None:
    assert line in patched(tmp_path, choices)


def test_an_argument_that_is_there_is_replaced(tmp_path: Path) -> None:
    source = SCRIPT.replace("batch_size=8,", "batch_size=8, num_workers=int('0'),").replace("lr=1e-3", "fused=False")
    text = patched(tmp_path, {"loader_workers": 2, "fused_optimizer": "fused"}, source)
    assert "num_workers=2," in text and "fused=True)" in text and "fused=False" not in text


def test_arguments_from_a_dict_are_added_to_whatever_it_holds(tmp_path: Path) -> None:
    source = SCRIPT.replace("batch_size=8,", "**{'batch_size': 8, 'num_workers': 0},")
    text = patched(tmp_path, {"loader_workers": 1, "pin_memory": None}, source)
    assert """**{**{**{'batch_size': 8, 'num_workers': 0}, "num_workers": 1}, "pin_memory": True},\n""" in text
    assert printed(text.replace('"pin_memory": True', '"pin_memory": False')) == printed(source)


def test_epochs_with_workers_have_the_order_that_they_have_without(tmp_path: Path) -> None:
    """With `persistent_workers` the second epoch was shuffled otherwise."""
    source = SCRIPT.replace("batch_size=8,", "batch_size=8, shuffle=True,").replace(
        "print(", "train(model, batches, optimizer)\n    train(model, batches, optimizer)\n    print("
    )
    assert printed(patched(tmp_path, {"loader_workers": 1}, source)) == printed(source)


def test_a_setting_of_the_process_needs_neither_optimizer_nor_an_import_of_torch_that_is_not_there() -> None:
    source = '"""Train."""\nfrom torch import nn\nfrom lib import train\n\n\ndef main():\n    import torch\n'
    found = patch_one(source, {"intraop_threads": 1})
    assert "+import torch\n+torch.set_num_threads(1)\n" in found.diff
    assert "no import at its top" in patch_one("train()\n", {"allocator": None}, "SGD").left["allocator"]


def test_a_call_within_a_larger_expression_keeps_its_meaning(tmp_path: Path) -> None:
    source = SCRIPT.replace(
        "out = model(x)\n        loss = nn.functional.cross_entropy(out, y)",
        "loss = nn.functional.cross_entropy(model(x), y)",
    )
    text = patched(tmp_path, {"autocast_bf16": None}, source, device="cuda")
    assert 'with torch.autocast("cuda", dtype=torch.bfloat16):\n            loss = nn.functional' in text
    assert ".float()" not in text


@pytest.mark.parametrize(
    ("change", "choices", "reason"),
    [
        (("optim.AdamW(model", "make(model"), {"fused_optimizer": "fused"}, "must stand once in the file, found 0"),
        (("AdamW(model.parameters()", "AdamW(params"), {"channels_last": None}, "does not name the model's"),
        (("batch_size=8,", "**a, **b,"), {"pin_memory": None}, "takes arguments from dicts; set pin_memory=True"),
        (("batches = DataLoader(", "batches = make("), {"loader_workers": 1}, "one DataLoader(…) must feed the loop"),
        (("loss.backward()", "step(loss)"), {"autocast_bf16": None}, "one loop must call backward(), found 0"),
        (("out = model(x)", "out = predict(x)"), {"autocast_bf16": None}, "must call model(…), found 0"),
        (("out = model(x)", "out, _ = model(x)"), {"autocast_bf16": None}, "outputs are unpacked, and each of them"),
        (("out = model(x)", "a = 1; out = model(x)"), {"autocast_bf16": None}, "not called on a line of its own"),
        (("model.parameters(), lr=1e-3", "p for p in model.parameters()"), {"fused_optimizer": "fused"}, "unusual way"),
        (("model.parameters()", "[p for m in (a,) for p in m.parameters()]"), {"channels_last": None}, "not name the"),
        (("model.parameters()", "[*model.parameters(), *head.parameters()]"), {"channels_last": None}, "not name the"),
        (("import torch\n", ""), {"channels_last": None}, "must import torch by that name"),
        (("import torch\n", "import torch as th\n"), {"autocast_bf16": None}, "must import torch by that name"),
        (("out = model(x)", "out = model(x).squeeze()"), {"autocast_bf16": None}, "must be named, or the loss be made"),
        (("", ""), {"torch_compile": "blocks"}, "call compile() of each in its place"),
        (("AdamW(model.", "AdamW(self."), {"torch_compile": None}, "self.compile() is of no use"),
        (("batches = DataLoader(", "batches = make()\n    others = DataLoader("), {"pin_memory": None}, "found 0"),
        (("\n", "\r\n"), {"channels_last": None}, "the file has Windows line ends"),
        (("import torch\n", "import torch\n\f\n"), {"channels_last": None}, "a form feed"),
        (("import torch\n", "import torch\n(\n"), {"channels_last": None}, "can't be parsed"),
        (("", ""), {"loader_workers": "threads=2"}, "ContinuousLoader(loader) has"),
        (("", ""), {"sample_cache": None}, "no line of a script does the same; keep it by plan="),
    ],
)  # fmt: skip
def test_what_can_not_be_written_is_left_out_with_its_reason(
    change: tuple[str, str], choices: dict[str, Any], reason: str
) -> None:
    source = SCRIPT.replace(*change) if change[0] else SCRIPT
    found = patch_one(source, choices)
    assert not found.diff and not found.written
    assert reason in found.left[next(iter(choices))]


def test_outputs_that_are_no_single_tensor_are_not_cast() -> None:
    """`outputs = model(**batch)` of Hugging Face has no `float()`."""
    plan = ModelPlan({"autocast_bf16": None}, "Net", "AdamW", "cpu", returns_tensor=False)
    assert "more than one tensor" in patch_script(SCRIPT, "train.py", [plan]).left["autocast_bf16"]


def test_the_loaders_own_workers_are_no_change_of_it() -> None:
    plan = ModelPlan({"loader_workers": 4}, "Net", "AdamW", "cpu", has_workers=True)
    assert "own workers have begun epochs early" in patch_script(SCRIPT, "train.py", [plan]).left["loader_workers"]


def test_the_optimizer_that_a_function_makes_may_be_another_models_too() -> None:
    source = (
        SCRIPT.replace("optim.AdamW(model", "make(model") + "\n\ndef make(m, lr):\n    return AdamW(m.parameters())\n"
    )
    plans = [ModelPlan({"fused_optimizer": "fused"}, name, "AdamW", "cpu") for name in ("G", "D")]
    found = patch_script(source, "train.py", plans)
    assert not found.diff and "made in a function" in found.left["fused_optimizer of G"]


def test_a_path_with_a_space_is_one_that_patch_finds() -> None:
    found = patch_script(SCRIPT, "my scripts/train.py", [ModelPlan({"pin_memory": None}, "Net", "AdamW", "cpu")])
    assert found.diff.startswith("--- a/my scripts/train.py\t\n+++ b/my scripts/train.py\t\n")


def test_every_registered_strategy_is_written_or_named() -> None:
    choices = {
        name: {"loader_workers": 1, "fused_optimizer": "fused", "intraop_threads": 1}.get(name) for name in names()
    }
    found = patch_one(SCRIPT, choices)
    assert sorted([*found.written, *found.left]) == sorted(names())
    added = "".join(line[1:] + "\n" for line in found.diff.splitlines() if line.startswith("+") and line[:3] != "+++")
    assert "model.compile()" in added


@pytest.mark.parametrize("is_in_a_function", [False, True])
def test_the_optimizers_of_two_models_are_told_apart_by_what_they_train(is_in_a_function: bool) -> None:
    """As in pytorch/examples' dcgan."""
    source = textwrap.dedent(
        """\
        import torch
        netG = Generator(1).to(device)
        netD = Discriminator(1).to(device)
        optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr)
        optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr)
        """
    )
    shared: dict[str, Any] = {"channels_last": None, "intraop_threads": 1}
    plans = [
        ModelPlan({**shared, "fused_optimizer": "fused"}, "Generator", "Adam", "cpu"),
        ModelPlan({**shared, "sample_cache": None}, "Discriminator", "Adam", "cpu"),
    ]

    if is_in_a_function:
        head, body = source.split("\n", 1)
        source = f"{head}\ndef main():\n{textwrap.indent(body, '    ')}"

    found = patch_script(source, "train.py", plans)

    added = [line[1:].strip() for line in found.diff.splitlines() if line.startswith("+") and line[:3] != "+++"]
    assert added == [
        "torch.set_num_threads(1)",
        "netD.to(memory_format=torch.channels_last)",
        "netG.to(memory_format=torch.channels_last)",
        "optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, fused=True)",
    ]
    assert found.written[:2] == ["channels_last of Generator", "intraop_threads of Generator"]
    assert list(found.left) == ["sample_cache of Discriminator"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the run of a script has kept: the fused optimizer and a cache of samples."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizers = Optimizers([torch.optim.AdamW([weight])])  # which is gone by now, as where a `main()` made it
    run = SimpleNamespace(
        optimizers=optimizers, inner=torch.nn.Sequential(), device=torch.device("cpu"), observed=Observed(), loader=[]
    )
    kept: dict[str, Any] = {"fused_optimizer": "fused", "sample_cache": None}
    models = {1: SimpleNamespace(session=SimpleNamespace(run=run), journal=SimpleNamespace(kept=kept))}
    monkeypatch.setattr(patch, "MODELS", models)
    return kept


def test_the_plan_of_the_only_model_is_written(kept: dict[str, Any], tmp_path: Path) -> None:
    said = patch.write_patch(tmp_path / "train.py", tmp_path, tmp_path / "out.diff")

    assert "with fused_optimizer (patch -p1 < " in said and "sample_cache is left out: no line" in said
    assert (tmp_path / "out.diff").read_text().startswith("--- a/train.py\n+++ b/train.py\n")
    kept.clear()
    assert patch.write_patch(tmp_path / "train.py", tmp_path, tmp_path / "none.diff") == "no patch: nothing was kept"
    assert not (tmp_path / "none.diff").exists()


def test_a_module_of_the_folder_that_the_script_is_imported_from_is_its_own(
    kept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "projects").mkdir()
    (tmp_path / "projects" / "run.py").write_text("from lib import main\n\nmain()\n", encoding="utf-8")
    (tmp_path / "lib.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "lib_of_this_test", SimpleNamespace(__file__=str(tmp_path / "lib.py")))
    script, folder, target = tmp_path / "projects" / "run.py", tmp_path / "projects", tmp_path / "out.diff"

    assert "found 0 times" in patch.write_patch(script, folder, target)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert f"with fused_optimizer (patch -p1 -d {tmp_path} < " in patch.write_patch(script, folder, target)
    assert target.read_text().startswith("--- a/lib.py\n+++ b/lib.py\n")


def test_a_module_whose_file_is_none_is_passed_over(
    kept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.ops says that its file is "_ops.py", wherever the script was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gone", SimpleNamespace(__file__=str(tmp_path / "gone.py")))
    assert torch.ops.__file__ == "_ops.py"

    said = patch.write_patch(tmp_path / "train.py", tmp_path, tmp_path / "out.diff")

    assert "with fused_optimizer" in said


def test_what_a_module_of_the_scripts_own_makes_is_changed_there_from_wherever_it_was_started(
    kept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("from lib import main\n\nmain()\n", encoding="utf-8")
    (tmp_path / "lib.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "below").mkdir()
    monkeypatch.setitem(sys.modules, "lib_of_this_test", SimpleNamespace(__file__=str(tmp_path / "lib.py")))

    said = patch.write_patch(tmp_path / "train.py", tmp_path / "below", tmp_path / "out.diff")

    assert f"with fused_optimizer (patch -p1 -d {tmp_path} < " in said and "sample_cache is left out: no line" in said
    assert (tmp_path / "out.diff").read_text().startswith("--- a/lib.py\n+++ b/lib.py\n")
