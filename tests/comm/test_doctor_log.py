"""NCCL logs: each check of a log fires on the lines it is for, and a good log gives nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.comm.doctor import NO_LOG, Examination, examine, nccl_log
from accel.comm.doctor.examination import LOG
from accel.comm.doctor.host import ERROR, INFO, WARN
from accel.comm.doctor.nccl_log import NotALog, parse
from tests.comm.fake_host import host

# The lines of a run over two nodes with two GPUs each, in the forms of NCCL 2.21 to 2.28.
HEAD = """\
node1:100:110 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node1:100:110 [0] NCCL INFO cudaDriverVersion 12040
NCCL version 2.27.3+cuda12.8
node1:100:111 [0] NCCL INFO comm 0x55cc8aa8 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1c000 commId 0x65e - Init START
node1:101:112 [1] NCCL INFO comm 0x55cc8aa9 rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 1d000 commId 0x65e - Init START
node2:200:211 [0] NCCL INFO comm 0x55cc8aaa rank 2 nranks 4 cudaDev 0 nvmlDev 0 busId 1c000 commId 0x65e - Init START
node2:201:212 [1] NCCL INFO comm 0x55cc8aab rank 3 nranks 4 cudaDev 1 nvmlDev 1 busId 1d000 commId 0x65e - Init START
"""
LOCAL = """\
node1:100:111 [0] NCCL INFO Channel 00/04 :    0   1   2   3
node1:100:111 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node2:200:211 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[1] via P2P/IPC
"""
GOOD = (
    HEAD
    + """\
node1:100:111 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
node1:100:111 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
node1:100:111 [0] NCCL INFO Using network IB
node1:101:112 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA
node2:201:212 [1] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [send] via NET/IB/0(2)/GDRDMA/Shared
node1:100:111 [0] NCCL INFO 4 coll channels, 4 collnet channels, 0 nvls channels, 4 p2p channels
"""
    + LOCAL
)
TCP = (
    HEAD
    + LOCAL
    + """\
node1:100:111 [0] NCCL INFO NET/IB : No device found.
node1:100:111 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node2:200:211 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>
node1:100:111 [0] NCCL INFO Using network Socket
node1:101:112 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
node2:201:212 [1] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [send] via NET/Socket/0
"""
)
INFO_LINE = "node1:100:111 [0] NCCL INFO "

# Check → (log, level, what the evidence must hold).
FIRES = [
    ("log_tcp", TCP, WARN, "2 connections via NET/Socket; NET/IB : No device found"),
    ("log_tcp", TCP.replace("NET/IB : No device found.", "x"), INFO, "no word of an InfiniBand device"),
    ("log_socket_threads", TCP, WARN, "no line"),
    ("log_channels", GOOD.replace("00/04", "00/01").replace(" 4 coll", " 1 coll"), WARN, "1 channel"),
    ("log_interface", TCP.replace("[0]eth0", "[0]docker0"), ERROR, "docker0"),
    ("log_interface", INFO_LINE + "NET/Socket : Using [0]lo:127.0.0.1<0>", INFO, "lo"),
    (
        "log_interfaces_differ",
        TCP.replace("[0]eth0:10.0.0.2", "[0]ens5:10.0.0.2"),
        INFO,
        "ens5 on node2, eth0 on node1",
    ),
    ("log_gdr", GOOD.replace("RDMA Enabled", "RDMA Disabled"), WARN, "Disabled for HCA 0 'mlx5_0'"),
    ("log_gdr", GOOD.replace("/GDRDMA", ""), WARN, "2 connections via NET/IB without /GDRDMA"),
    ("log_gdr", INFO_LINE + "GPU Direct RDMA Disabled for GPU ca000 / HCA 0 (distance 7 > 4)", WARN, "distance 7"),
    (
        "log_p2p",
        GOOD.replace("via P2P/CUMEM/read", "via SHM/direct/direct").replace("P2P/IPC", "SHM/direct"),
        WARN,
        "2 conn",
    ),
    (
        "log_p2p",
        GOOD + INFO_LINE + "P2P is disabled between connected GPUs 0 and 1. You can repress",
        WARN,
        "GPUs 0 and 1",
    ),
    ("log_local_net", GOOD.replace("1[1] via P2P/CUMEM/read", "1[1] [send] via NET/Socket/0"), WARN, "1 connections"),
    (
        "log_shm",
        GOOD + "node1:100:111 [0] include/shm.h:28 NCCL WARN Error: failed to extend /dev/shm/nccl-x to 9637888 bytes",
        ERROR,
        "9637888",
    ),
    ("log_acs", GOOD + INFO_LINE + "HINT: In many cases this error occurs when ACS is enabled which", WARN, "ACS"),
    ("log_versions", GOOD + "NCCL version 2.21.5+cuda12.4", ERROR, "2.21.5, 2.27.3"),
    (
        "log_versions",
        GOOD + "node1:1:2 [0] ras/ras.cc:415 NCCL WARN NCCL version mismatch with remote peer",
        ERROR,
        "mismatch",
    ),
    (
        "log_plugin",
        GOOD + INFO_LINE + "NET/Plugin : Plugin load (libnccl-net.so) failed: cannot open",
        INFO,
        "libnccl-net",
    ),
    (
        "log_plugin",
        GOOD
        + INFO_LINE
        + "NCCL_NET_PLUGIN set by environment to ofi\n"
        + INFO_LINE
        + "NET/Plugin: Could not find: ofi",
        WARN,
        "ofi",
    ),
    (
        "log_warnings",
        GOOD
        + "[2026-01-01 10:00:00] node1:1:2 [0] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed\n" * 2,
        WARN,
        "Connection closed (2 times)",
    ),
]


def diagnose(text: str, tmp_path: Path) -> Examination:
    return examine(host(tmp_path), parse(text.splitlines()))


@pytest.mark.parametrize(("name", "text", "level", "evidence"), FIRES, ids=[row[0] for row in FIRES])
def test_check_fires(name: str, text: str, level: str, evidence: str, tmp_path: Path) -> None:
    found = [finding for finding in diagnose(text, tmp_path).findings if finding.check == name]
    assert [finding.level for finding in found] == [level]
    assert evidence in found[0].evidence


def test_every_check_of_a_log_has_a_case_that_makes_it_fire() -> None:
    assert {name for name, *_ in FIRES} == {check.name for check in LOG}


def test_checks_find_nothing_in_a_good_log(tmp_path: Path) -> None:
    diagnosis = diagnose(GOOD, tmp_path)
    assert {check.name for check in LOG} <= set(diagnosis.passed)
    assert not diagnosis.findings


def test_helper_threads_silence_the_check_of_threads(tmp_path: Path) -> None:
    text = TCP + INFO_LINE + "NET/Socket: Using 4 threads and 4 sockets per thread"
    assert "log_socket_threads" in diagnose(text, tmp_path).passed


def test_without_a_log_its_checks_say_so(tmp_path: Path) -> None:
    unseen = dict(examine(host(tmp_path)).unseen)
    assert unseen == {check.name: NO_LOG for check in LOG}


def test_settings_in_the_log_count_before_the_environment(tmp_path: Path) -> None:
    text = GOOD + INFO_LINE + "NCCL_P2P_DISABLE set by environment to 1.\n"
    diagnosis = diagnose(text, tmp_path)
    assert [finding.evidence for finding in diagnosis.findings] == ["log: NCCL_P2P_DISABLE=1"]


@pytest.mark.parametrize(
    "prefix",
    ["", "[rank0]: ", "[1,0]<stderr>:", "2026-01-01T10:00:00 worker-0 | ", "[default0]:"],
    ids=["plain", "torchrun", "mpirun", "kubernetes", "elastic"],
)
def test_prefixes_of_launchers_are_skipped(prefix: str) -> None:
    log = parse(prefix + line for line in GOOD.splitlines())
    assert log.host_of == {0: "node1", 1: "node1", 2: "node2", 3: "node2"}
    assert log.transports == {"NET/IB/GDRDMA": 2, "P2P": 2}
    assert log.versions == {"2.27.3"}


def test_old_forms_of_the_lines_are_read() -> None:
    log = parse(
        [
            "ip-1:45384:45384 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.10.182<0> [1]ens4:172.31.10.183<0>",
            "ip-1:45384:45384 [0] NCCL INFO Channel 00 : 0[1a000] -> 1[1a000] [receive] via NET/IB/0",
        ]
    )
    assert log.interfaces == {"ens3": {"ip-1"}, "ens4": {"ip-1"}}
    assert log.transports == {"NET/IB": 1}


@pytest.mark.parametrize("text", ["", "epoch 1 loss 2.3\n", "import nccl\n"])
def test_what_is_no_log_is_refused(text: str) -> None:
    with pytest.raises(NotALog, match="no line of NCCL; run with NCCL_DEBUG=INFO"):
        parse(text.splitlines())


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(range(256)) * 10)
    with pytest.raises(NotALog):
        nccl_log.read(file)
