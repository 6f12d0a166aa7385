"""The bandwidth table: definitions of nccl-tests, exact checks, lines, link classes, and ranks that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from accel.comm.bandwidth import Bandwidth, PeerLost, Row, Settings, fit_line, measure_links, table
from accel.comm.bandwidth.cases import OPERATIONS, LinkClass, RankPlace, elements, links_of, modulus, sent_bytes
from accel.comm.ranks.topology import by_machine
from accel.commands.bench import _DTYPES, BandwidthTable, Request, _child, bench, size_text
from accel.commands.cli import main
from benchmarks.comm.lab import Lab
from tests.comm import bandwidth_ranks, tcp_bytes
from tests.comm.ranks import on_ranks, run_ranks

ROOT = Path(__file__).resolve().parents[2]

# --- definitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("reduce_scatter", 8, 0.875),
        ("all_gather", 8, 0.875),
        ("all_to_all", 8, 0.875),
        ("broadcast", 8, 1.0),
        ("send_recv", 8, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, ranks: int, factor: float) -> None:
    row = bandwidth_ranks.row(operation, 1000, 0.5, "world", ranks)
    assert row.algbw == 2000
    assert row.busbw == 2000 * factor


@pytest.mark.parametrize(
    ("operation", "size", "ranks", "count"),
    [("all_reduce", 4096, 3, 1024), ("all_gather", 4096, 3, 1023), ("all_to_all", 1, 3, 3), ("broadcast", 1, 3, 1)],
)
def test_sizes_are_rounded_down_to_whole_blocks(operation: str, size: int, ranks: int, count: int) -> None:
    assert elements(OPERATIONS[operation], size, torch.float32, ranks) == count


@pytest.mark.parametrize("name", _DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 7, 64, 100])
def test_sums_of_the_pattern_are_exact(name: str, ranks: int) -> None:
    dtype = getattr(torch, name)
    m = modulus(dtype, ranks)
    assert 2 <= m <= 127
    values = torch.full((ranks,), m - 1)
    total = torch.zeros((), dtype=dtype)
    for value in values.to(dtype):
        total = total + value  # rank after rank, as a ring adds
    assert int(total) == ranks * (m - 1)


def test_a_sum_that_can_not_be_exact_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a sum over 200 ranks can't be checked exactly in int8, .* up to 127; choose"
    ):
        modulus(torch.int8, 200)


@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_elements_are_counted(name: str) -> None:
    place = RankPlace(None, (0, 1, 2), 1, torch.device("cpu"))
    count = elements(OPERATIONS[name], 4000, torch.float32, 3)
    case = OPERATIONS[name].make(place, count, torch.float32)
    right = case.expected(0, case.output.numel())
    case.output.copy_(right)
    assert case.wrong() == 0
    case.output[5] += 1
    case.output[7] = float("nan")
    assert case.wrong() == 2
    case.output.copy_(right.roll(1))
    assert case.wrong() > 0.9 * len(right), "a buffer that is off by one element must not look right"
    case.fill()
    assert case.wrong() > 0.5 * len(right), "an operation that does nothing must not look right"


# --- lines -----------------------------------------------------------------------------------------------------------

positive = st.floats(1e-7, 1e-1)


@given(positive, st.floats(1e-12, 1e-6), st.lists(st.integers(0, 24), min_size=2, max_size=6, unique=True))
def test_a_line_is_found_again(alpha: float, beta: float, powers: list[int]) -> None:
    points = [(float(1 << power), alpha + beta * (1 << power)) for power in powers]
    fit = fit_line(points)
    assert fit.error < 1e-6
    assert fit.seconds(points[0][0]) == pytest.approx(points[0][1], rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 10)), min_size=2, max_size=8))
def test_no_line_falls_or_starts_below_zero(points: list[tuple[int, float]]) -> None:
    if len({size for size, _ in points}) < 2:
        return
    fit = fit_line(points)
    assert fit.alpha_s >= 0
    assert fit.beta_s_per_byte >= 0
    assert fit.alpha_s + fit.beta_s_per_byte > 0


def test_small_sizes_set_alpha_though_large_ones_last_longer() -> None:
    fit = fit_line([(4096, 1.0e-3), (1 << 26, 0.56), (1 << 27, 1.09)])
    assert fit.alpha_s == pytest.approx(1e-3, rel=0.1)


def test_small_sizes_that_a_token_bucket_let_pass_do_not_promise_speed() -> None:
    # A broadcast at 100 Mbit/s: 4 KB pass at once, 8 MB at the shaped rate.
    fit = fit_line([(4096, 1.9e-4), (8 << 20, 0.7019)])
    assert fit.alpha_s == 0
    assert fit.seconds(8 << 20) == pytest.approx(0.7019, rel=0.01)
    assert fit.error > 0.3


def test_one_size_is_no_line() -> None:
    with pytest.raises(ValueError, match="a line needs two different sizes"):
        fit_line([(4096, 1.0), (4096, 1.1)])


# --- link classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("aa", {"intra": ((0, 1),)}),
        ("ab", {"inter": ((0, 1),)}),
        ("abab", {"intra": ((0, 2), (1, 3)), "inter": ((0, 1),), "world": ((0, 1, 2, 3),)}),
        ("aab", {"intra": ((0, 1),), "inter": ((0, 2),), "world": ((0, 1, 2),)}),
        ("a", {"intra": ((0,),)}),
    ],
)
def test_links_follow_from_nodes(keys: str, expected: dict[str, Any]) -> None:
    assert {link.name: link.sets for link in links_of(by_machine([{"machine": key} for key in keys]).hosts)} == expected


def test_a_rank_outside_a_link_stands_aside() -> None:
    assert LinkClass("inter", ((0, 2),)).own(1) == ()


def test_bytes_are_read_without_counting_bridges_twice(tmp_path: Path) -> None:
    for name, sent in {"lo": 5, "eth0": 100, "eth1": 20, "bond0": 120, "tun0": None}.items():
        folder = tmp_path / name / "statistics"
        folder.mkdir(parents=True)
        if sent is not None:
            (folder / "tx_bytes").write_text(f"{sent}\n")
    (tmp_path / "bond0/lower_eth0").touch()
    assert sent_bytes(False, tmp_path) == 120
    assert sent_bytes(True, tmp_path) == 5
    assert sent_bytes(False, tmp_path / "none") is None


def test_a_link_that_was_not_measured_is_stood_for() -> None:
    speed = Bandwidth(((0, 1),), (), 0.1, ("intra",))
    assert speed.link("world") == speed.link("inter") == "intra"
    with pytest.raises(ValueError, match="link must be one of intra, inter, world, got 'wifi'"):
        speed.link("wifi")


# --- ranks -----------------------------------------------------------------------------------------------------------


def measured(operations: list[str], sizes: list[int], **options: Any) -> Bandwidth:
    """Measure, and see that all ranks have the same."""
    speed = measure_links(operations, sizes, **options)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, speed)
    assert all(one == speed for one in everyone)
    return speed


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.int8))],
    ids=str,
)
@on_ranks(3)
def test_every_operation_is_right_at_every_size_and_equal_on_all_ranks(
    rank: int, world: int, dtype: torch.dtype
) -> None:
    # One byte (a single element), a size that three ranks don't divide, and one of several segments.
    rows = measured(list(OPERATIONS), [1, 4099, 300_000], by_size=False, settings=Settings(dtype=dtype, runs=3)).rows
    assert [row.problem for row in rows] == [""] * (3 * len(OPERATIONS))
    assert [row.wrong for row in rows] == [0] * len(rows)
    assert all(row.time_p20_s <= row.time_s <= row.time_p80_s for row in rows)  # type: ignore[operator]


@on_ranks(2)
def test_bytes_on_the_wire_are_those_of_the_algorithms(rank: int, world: int) -> None:
    def sent_bytes(loopback: bool) -> int:
        """Count the bytes of these ranks' connections alone: other processes use loopback as well."""
        dist.barrier()  # a broadcast ends at its root while the last bytes still wait in the socket's buffer
        total = torch.tensor(sum(tcp_bytes.sockets().values()))
        dist.all_reduce(total)
        return int(total)

    table.sent_bytes = sent_bytes
    # Of the largest size, in bytes of the operation: the root of a broadcast sends all, the other rank nothing.
    bounds = {"all_reduce": (1.0, 1.5), "all_gather": (0.5, 0.9), "broadcast": (0.5, 0.9)}
    for row in measured(list(bounds), [1 << 20, 4 << 20]).rows:
        low, high = bounds[row.operation]
        assert row.sent_bytes is not None
        assert row.size_bytes < 4 << 20 or low <= row.sent_bytes / row.size_bytes < high, row


@on_ranks(2)
def test_probe_ends_in_time_with_the_same_lines_everywhere(rank: int, world: int) -> None:
    sizes = [4096, 1 << 16, 1 << 19, 64 << 20]
    speed = measured(["all_reduce", "all_to_all"], sizes, settings=Settings(budget_s=0.0))
    assert {row.size_bytes for row in speed.rows} == {4096, 1 << 16}
    assert speed.fit("all_to_all", "world") == speed.fit("all_to_all", "intra")


@on_ranks(4)
def test_links_inside_and_between_nodes_are_measured_apart(rank: int, world: int) -> None:
    table.identity = lambda: {"machine": f"node{rank // 2}"}
    speed = measured(["all_reduce", "send_recv"], [4096, 65536], settings=Settings(runs=2))
    assert speed.nodes == ((0, 1), (2, 3))
    assert speed.links == ("intra", "inter", "world")
    assert {(row.link, row.ranks) for row in speed.rows} == {("intra", 2), ("inter", 2), ("world", 4)}
    assert [row.wrong for row in speed.rows] == [0] * 12


@on_ranks(2)
def test_what_is_wrong_or_lacking_is_in_its_row_and_the_next_goes_on(rank: int, world: int) -> None:
    honest = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        done = honest(tensor, *arguments, **options)
        if rank == 1:
            tensor[3] += 1
        return done

    def all_to_all_single(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("Backend gloo does not support all_to_all_single")

    dist.all_reduce, dist.all_to_all_single = all_reduce, all_to_all_single
    rows = measured(["all_reduce", "all_to_all", "broadcast"], [1024, 4096], settings=Settings(runs=2)).rows
    assert [row.wrong for row in rows if row.operation == "all_reduce"] == [1, 1]
    (lacking,) = [row for row in rows if row.operation == "all_to_all"]
    assert "does not support all_to_all_single" in lacking.problem
    assert [row.problem for row in rows if row.operation == "broadcast"] == ["", ""]


def test_a_rank_that_dies_is_one_sentence_and_no_hang() -> None:
    alive, dead = run_ranks(bandwidth_ranks.dying, 2, meet=False)
    assert dead == 9
    assert isinstance(alive, PeerLost)
    assert "all_reduce of 65536 bytes was cut off: a rank no longer answers" in str(alive)


def test_an_operation_that_fails_on_one_rank_ends_on_all() -> None:
    results = run_ranks(bandwidth_ranks.failing_alone, 2, meet=False)
    assert [type(result) for result in results] == [PeerLost, PeerLost]
    assert "failed: rank" in str(results[0])


@on_ranks(1)
def test_arguments_out_of_range_are_refused(rank: int, world: int) -> None:
    for operations, sizes, options, text in (
        (["all_reduce", "scan"], [4096], {}, "operations must be among .*, got scan"),
        (["all_reduce"], [4096, 64], {}, "sizes must be increasing numbers of bytes, got"),
        (["all_reduce"], [4096], {"links": ["inter"]}, r"links must hold one that is there \(intra\), got inter"),
        (["all_reduce"], [4096], {"links": ["wifi"]}, "links must be among intra, inter, world, got wifi"),
    ):
        with pytest.raises(ValueError, match=text):
            measure_links(operations, sizes, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["warmup", "runs", "timeout_s", "row_s"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        Settings(**{name: -1})


# --- command ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_of_eighty_columns_and_writes_it(tmp_path: Path) -> None:
    target = tmp_path / "speed.json"
    options = ["--max-size", "64K", "--iters", "3", "--dtype", "bfloat16", "--report", str(target)]
    (code, printed, errors), other = run_ranks(bandwidth_ranks.command, 2, *options, meet=False)
    assert code == 0, errors
    assert other == (0, "", "")
    assert errors == f"wrote {target}\n"
    assert max(map(len, printed.splitlines())) <= 80
    assert "every result exact" in printed
    written = json.loads(target.read_text())
    assert (written["kind"], written["schema"], written["backend"], written["nodes"]) == ("comm", 2, "gloo", [[0, 1]])
    rows = [row for row in written["rows"] if row["operation"] == "all_reduce"]
    assert [row["size_bytes"] for row in rows] == [4096, 16384, 65536]
    assert all(row["busbw"] == pytest.approx(row["size_bytes"] / row["time_s"]) for row in rows)
    assert {fit["operation"] for fit in written["fits"]} == set(OPERATIONS)


def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    target = tmp_path / "new" / "speed.json"
    for words in (["bench", "comm"], ["doctor", "network"], ["doctor"]):
        done = CliRunner().invoke(main, [*words, "--report", str(target)])
        assert done.exit_code == 2
        assert f"--report must lie in a directory that exists, got {str(target)!r}; make it first" in done.output
    assert not target.parent.exists()


def test_a_fit_that_is_no_line_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    request = Request(("all_reduce",), (), (), "float32", "gloo", 2, 1, 0.1, 5.0, "", "")
    table = BandwidthTable(request, "gloo", 2)

    def rows(operation: str, times: list[float]) -> list[Row]:
        return [bandwidth_ranks.row(operation, 4096 << 2 * number, time_s) for number, time_s in enumerate(times)]

    table.end([*rows("all_reduce", [1e-4, 2e-4, 5e-4]), *rows("broadcast", [1e-4, 9e-3, 2e-4])], None, "")
    said = " ".join(capsys.readouterr().out.split())
    assert "all_reduce intra" in said.partition("no line")[0]
    assert "no line: broadcast intra; times are up to" in said
    table.end(rows("broadcast", [1e-4, 9e-3, 2e-4]), None, "")
    assert "worst error" not in capsys.readouterr().out


def test_one_rank_alone_says_what_needs_two() -> None:
    request = Request(("send_recv",), (4096,), (), "float32", "gloo", 2, 1, 0.1, 5.0, "", "")
    (printed,) = run_ranks(bandwidth_ranks.alone, 1, request, meet=False)  # the command ends the group itself
    assert "4K: not supported: it needs two ranks" in printed


@pytest.mark.slow
def test_a_killed_rank_ends_the_command_with_what_was_measured(tmp_path: Path) -> None:
    target = tmp_path / "speed.json"
    options = ["--min", "64M", "--max", "256M", "--row-seconds", "20", "--iters", "1000", "--timeout", "10"]
    line = [sys.executable, "-m", "accel", "bench", "comm", "-o", "broadcast", *options, "--report", str(target)]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("accel bench comm"):  # the ranks have met
        assert process.poll() is None
    time.sleep(2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(ranks[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "was cut off: a rank no longer answers" in errors
    assert "rank 1 was ended by signal 9 before the table was complete" in errors
    assert json.loads(target.read_text())["problem"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--min", "1M", "--max", "4K"], "--max must be at least --min"),
        (["--min", "12Q"], "must be a number of bytes such as 4096, 4K or 64M"),
        (["--min", "0"], "must be a number of bytes"),
        (["-o", "scan"], "'scan' is not one of"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(main, ["bench", "comm", *arguments])
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())


def test_ranks_are_torchruns_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(main, ["bench", "comm", "--ranks", "2"])
    assert (done.exit_code, done.output) == (2, "error: --ranks must not be given under torchrun, which started 2\n")


def test_a_backend_that_torch_lacks_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    request = Request(("all_reduce",), (4096,), (), "float32", "carrier-pigeon", 2, 1, 0.1, 5.0, "", "")
    with pytest.raises(SystemExit) as ended:
        _child(request, 0, 2, "file:///nowhere")
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: --backend must be one that this torch has (gloo")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "text"), [(4096, "4K"), (65536, "64K"), (1 << 30, "1G"), (4092, "4092"), (1536, "1536"), (3 << 20, "3M")]
)
def test_sizes_are_said_shortly(size: int, text: str) -> None:
    assert size_text(size) == text


def test_the_manual_names_every_option_and_operation() -> None:
    page = (ROOT / "docs/bandwidth.md").read_text(encoding="utf-8")
    options = [option for parameter in bench.commands["comm"].params for option in parameter.opts]
    assert not [option for option in options if option.startswith("--") and f"`{option}`" not in page]
    assert not [name for name in OPERATIONS if f"`{name}`" not in page]


# --- shaped links ----------------------------------------------------------------------------------------------------


def in_lab(lab: Lab, ranks: int, target: Path, *arguments: str, timeout_s: float = 90) -> dict[str, Any]:
    line = ["-m", "accel", "bench", "comm", *arguments, "--report", str(target)]
    lab.run(line, ranks=ranks, timeout_s=timeout_s, check=False)
    written: dict[str, Any] = json.loads(target.read_text())
    return written


@pytest.mark.net
@pytest.mark.slow
def test_the_rate_of_a_shaped_link_and_the_bytes_on_it_are_found(tmp_path: Path) -> None:
    with Lab(hosts=2, rate="100mbit") as lab:
        options = ["-o", "all_reduce", "-o", "broadcast", "--min-size", "4K", "--max-size", "1M", "--factor", "256"]
        written = in_lab(lab, 2, tmp_path / "speed.json", *options, "--row-seconds", "1")
    assert written["nodes"] == [[0, 1], [2, 3]]
    large = {(row["link"], row["operation"]): row for row in written["rows"] if row["size_bytes"] == 1 << 20}
    inter = large["inter", "all_reduce"]
    # 12.5 MB/s less the headers of Ethernet and TCP is 11.9.
    assert 11.0e6 < inter["busbw"] < 12.6e6
    assert inter["sent_bytes"] / inter["size_bytes"] == pytest.approx(1.0, rel=0.03)
    world = large["world", "all_reduce"]
    # The ring of four ranks passes each host's link once: 2 * 3 / 4 of the buffer.
    assert world["sent_bytes"] / world["size_bytes"] == pytest.approx(1.5, rel=0.03)
    assert large["intra", "all_reduce"]["busbw"] > 2 * inter["busbw"]
    fits = {(fit["link"], fit["operation"]): fit for fit in written["fits"]}
    assert 1 / fits["inter", "broadcast"]["beta_s_per_byte"] == pytest.approx(11.9e6, rel=0.1)
