"""Public scripts: what counts as the same result, why nothing was won, and the data that they read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import public_scripts
from benchmarks.public import data
from benchmarks.public.scripts import COMMITS, SCRIPTS, PublicScript
from benchmarks.public_scripts import Ending, compare, run
from tests.kernels.hosts import need

PLAIN = Ending(0, "loss 0.5\n", {"model.pt": "aa"}, 10.0, "")


def test_ten_scripts_and_more_each_at_one_commit() -> None:
    assert len(SCRIPTS) >= 10
    assert {script.repo for script in SCRIPTS.values()} == COMMITS.keys()
    assert all(len(commit) == 40 for commit in COMMITS.values())


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (PLAIN, ""),
        (replace(PLAIN, seconds=3.0, said="accel: 1.2x"), ""),
        (replace(PLAIN, files={"model.pt": "aa", "out/train.log": "bb"}), ""),
        (replace(PLAIN, status=1), "exit status 1, plainly 0"),
        (replace(PLAIN, output="loss 0.6\n"), "output: 'loss 0.6', plainly 'loss 0.5'"),
        (replace(PLAIN, output=""), "output: 'the number of lines', plainly ''"),
        (replace(PLAIN, files={"model.pt": "bb"}), "files: model.pt"),
        (replace(PLAIN, files={}), "files: model.pt"),
    ],
)
def test_a_result_is_exit_status_output_and_files(other: Ending, difference: str) -> None:
    assert PLAIN.differs(other) == difference


SOURCE = """
import sys, time
print("iter 1: loss 0.5, time %.2fms, mfu 1.00%%" % time.perf_counter())
print(f"| ms/batch {time.perf_counter():5.2f} | loss")
open("result.txt", "w").write(open("data/train.txt").read()[:10] + sys.argv[1])
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def own_script(tmp_path: Path) -> tuple[PublicScript, Path]:
    source = tmp_path / "repo"
    (source / "folder").mkdir(parents=True)
    (source / "folder" / "train.py").write_text(SOURCE)
    return PublicScript("owner/repo", "folder/train.py", ("3",), data=data.wikitext, data_at="data"), source


def test_a_run_has_status_output_without_times_and_the_files_written(
    own_script: tuple[PublicScript, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = data._text
    monkeypatch.setattr(data, "_text", lambda words: text(words // 100))  # all of it takes 2 s each time
    ending = run(*own_script, None, tmp_path)
    assert ending.status == 3
    assert ending.output == "iter 1: loss 0.5, , \n|  | loss\n"
    assert list(ending.files) == ["folder/result.txt"]
    assert not list((tmp_path / "repo").rglob("result.txt"))  # it ran in a copy
    assert not ending.differs(run(*own_script, None, tmp_path))


def test_why_nothing_was_won(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    said = "warning\naccel: nothing was made faster: no step of a torch optimizer was seen (0 batches)\n"
    assert public_scripts._why(report, said) == "no step of a torch optimizer was seen (0 batches)"
    rows = [{"name": "allocator", "status": "kept", "gain": 1.2}, {"name": "threads", "status": "undone", "gain": 0.6}]
    report.write_text(json.dumps({"rows": rows}))
    assert public_scripts._why(report, said) == "allocator"
    report.write_text(json.dumps({"rows": rows[1:]}))
    assert public_scripts._why(report, said) == "nothing: threads 0.60x"
    rows = [{"name": "allocator", "status": "not tried", "gain": None}]
    report.write_text(json.dumps({"rows": rows, "state": "interrupted"}))
    assert public_scripts._why(report, said) == "nothing: the run ended before anything was tried"
    report.write_text(json.dumps({"rows": rows, "state": "done"}))
    assert public_scripts._why(report, said) == "nothing: what applies would gain too little"


def test_plain_first_and_later_runs_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def answer(script: PublicScript, source: Path, options: list[str] | None, scratch: Path) -> Ending:
        kind = "later" if (scratch / "cache").exists() else "first"
        kind = "plain" if options is None else "exact" if "exact" in options else kind
        ran.append(kind)
        if options is not None:
            (scratch / "cache").mkdir(exist_ok=True)
        return replace(PLAIN, status=0, seconds={"plain": 10.0, "exact": 10.5, "first": 9.0, "later": 5.0}[kind])

    monkeypatch.setattr(public_scripts, "run", answer)
    row = compare("mnist", tmp_path, 3)
    turns = ["plain", "first", "later", "first", "later", "plain", "plain", "first", "later"]
    assert ran == ["plain", "exact", *turns]
    assert row["same"] == "yes" and row["plain_s"] == 10.0
    assert [row["first_low"], row["first"], row["first_high"]] == pytest.approx(3 * [10 / 9])
    assert [row["low"], row["ratio"], row["high"]] == pytest.approx(3 * [2.0])


def test_a_script_that_fails_plainly_is_no_match(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = replace(PLAIN, status=1, said="Traceback\nOSError: no such data\n")
    monkeypatch.setattr(public_scripts, "run", lambda *_: failed)
    with pytest.raises(public_scripts.ScriptFailed, match="mnist fails plainly, with status 1: OSError: no such data"):
        compare("mnist", tmp_path, 2)


def test_the_others_are_run_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def compared(name: str, source: Path, rounds: int) -> None:
        ran.append(name)
        raise public_scripts.ScriptFailed(f"{name} fails plainly, with status 1: no such data")

    monkeypatch.setattr(public_scripts, "compare", compared)
    monkeypatch.setattr(public_scripts, "fetch", lambda repo, folder: folder)
    done = CliRunner().invoke(public_scripts.main, ["vae", "mnist"], catch_exceptions=False)
    assert ran == ["vae", "mnist"] and done.exit_code == 1
    assert done.output.count("fails plainly, with status 1: no such data") == 2


def test_pictures_are_what_torchvision_reads_and_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("torchvision")
    from torchvision import datasets

    monkeypatch.setattr(data, "_SAMPLES", {part: count // 10 for part, count in data._SAMPLES.items()})
    for folder in ("one", "other"):
        data.mnist(tmp_path / folder)
    train = datasets.MNIST(tmp_path / "one", train=True, download=True)
    assert (len(train), train[0][0].size, set(map(int, train.targets))) == (600, (28, 28), set(range(10)))
    one, other = ((tmp_path / folder).rglob("*.gz") for folder in ("one", "other"))
    assert [path.read_bytes() for path in sorted(one)] == [path.read_bytes() for path in sorted(other)]
