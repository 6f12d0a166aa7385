"""The network doctor: each check fires on what it is for and stays silent on a machine where nothing is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.comm.doctor import Examination, examine
from accel.comm.doctor.examination import LOG, MACHINE, Check, look
from accel.comm.doctor.host import ERROR, INFO, WARN, Hit, Host, NotSeen, limits, matching, run_command
from accel.comm.doctor.machine import acs_bits
from tests.comm.fake_host import CARD, NET, PCI, config_space, host, interface

NO_RDMA = {"/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"}
NO_GPU = {f"{PCI}/0000:01:00.0": None, f"{PCI}/0000:02:00.0": None}
TWO_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}

GROUPS = "/sys/fs/cgroup"
JOB = {"/proc/self/cgroup": "0::/job\n"}


def memory(group: str, limit: str, used: str) -> dict[str, str]:
    files = {f"{GROUPS}/{group}.{limit}": str(20 << 20), f"{GROUPS}/{group}.{used}": str(19 << 20)}
    return {f"{GROUPS}/memory.max": "max", **files}


# Check → (what is different, level, what the evidence must hold).
FIRES: list[tuple[str, dict[str, Any], str, str]] = [
    ("socket_threads", {"files": NO_RDMA}, WARN, "0x15b3"),
    ("socket_threads", {"files": {**NO_RDMA, f"{CARD}/device/vendor": "0x1af4"}}, WARN, "virtio"),
    ("socket_threads", {"files": {**NO_RDMA, **NO_GPU}}, INFO, "unset"),
    ("socket_threads", {"files": {**NO_RDMA, f"{CARD}/device": None}}, WARN, "not there"),
    ("interface_missing", {"files": {f"{CARD}/operstate": "down"}, "env": {"TP_SOCKET_IFNAME": "eth0"}}, ERROR, "eth0"),
    ("loopback", {"files": {CARD: None, **interface("docker0")}}, INFO, "docker0"),
    ("hostname_loopback", {"resolve": lambda name: ["127.0.1.1"]}, WARN, "127.0.1.1"),
    ("hostname_loopback", {"resolve": lambda name: ["127.0.0.1", "::1"], "env": TWO_NODES}, ERROR, "node1"),
    ("hostname_loopback", {"resolve": lambda name: []}, INFO, "no address"),
    (
        "link_speed",
        {"files": {f"{CARD}/speed": "1000", **interface("ens5")}, "env": {"NCCL_SOCKET_IFNAME": "eth"}},
        WARN,
        "ens5",
    ),
    ("link_speed", {"files": {f"{CARD}/speed": "100"}}, ERROR, "100 Mbit/s"),
    ("pcie_link", {"files": {f"{CARD}/device/current_link_width": "4"}}, WARN, "max_link_width: 16"),
    ("pcie_link", {"files": {f"{CARD}/device/current_link_speed": "2.5 GT/s PCIe"}}, WARN, "2.5 GT/s"),
    ("mtu", {"files": {f"{CARD}/mtu": "1500"}}, INFO, "1500 at 100000"),
    ("mtu_differs", {"files": interface("ens5", mtu=1500)}, WARN, "ens5/mtu: 1500"),
    ("mtu_differs", {"files": {f"{CARD}/lower_ens6/x": "", f"{NET}/ens6/mtu": "1500"}}, WARN, "ens6/mtu: 1500"),
    ("link_errors", {"files": {f"{CARD}/statistics/rx_dropped": "5000"}}, WARN, "rx_dropped: 5000"),
    ("tcp_retransmits", {"files": {"/proc/net/snmp": "Tcp: OutSegs RetransSegs\nTcp: 100000 900"}}, WARN, "0.9 %"),
    ("tcp_buffers", {"files": {"/proc/sys/net/ipv4/tcp_wmem": "4096 16384 4194304"}}, WARN, "at most 4194304"),
    (
        "tcp_buffers",
        {"files": {f"{CARD}/speed": "-1", "/proc/sys/net/ipv4/tcp_rmem": "4096 1 212992"}},
        WARN,
        "kernel's own",
    ),
    ("tcp_buffers", {"files": {"/proc/sys/net/ipv4/tcp_moderate_rcvbuf": "0"}}, WARN, "tcp_moderate_rcvbuf"),
    ("shaped_link", {"qdisc": "qdisc tbf 1: root rate 1Gbit burst 64Kb lat 50ms"}, WARN, "64Kb"),
    ("shaped_link", {"qdisc": "qdisc tbf 1: root rate 100Mbit burst 256Kb lat 50ms"}, INFO, "100Mbit"),
    ("shaped_link", {"qdisc": "qdisc netem 8001: root limit 1000 delay 10ms"}, INFO, "netem"),
    ("peer_memory", {"files": {"/sys/module/nvidia_peermem": None}}, WARN, "nv_mem_nc"),
    ("rdma_files", {"files": {"/dev/infiniband": None}}, ERROR, "not there"),
    ("memlock", {"limits": {"memlock": 65536.0, "nofile": 65536.0}}, ERROR, "64 KiB"),
    ("acs", {"files": {f"{PCI}/0000:00:01.0/config": config_space(0x1D)}}, WARN, "ReqRedir"),
    ("iommu", {"files": {"/proc/cmdline": "quiet"}}, WARN, "dmar0"),
    (
        "numa",
        {"files": {f"{PCI}/0000:01:00.0": None, "/sys/class/infiniband/mlx5_0": None}},
        INFO,
        "eth0 numa_node: 0; GPUs: ['1']",
    ),
    ("shm_size", {"space": lambda name: 64 << 20}, WARN, "64 MiB"),
    ("open_files", {"limits": {"memlock": float("inf"), "nofile": 1023.0}}, WARN, "1023"),
    ("cpu_limit", {"files": {"/sys/fs/cgroup/cpu.max": "200000 100000"}}, WARN, "2 cores"),
    ("cpu_limit", {"files": {**JOB, f"{GROUPS}/job/cpu.max": "200000 100000"}}, WARN, "/job/cpu.max: 2 cores"),
    (
        "cpu_throttled",
        {"files": {**JOB, f"{GROUPS}/job/cpu.stat": "nr_periods 50\nnr_throttled 9"}},
        WARN,
        "/job/cpu.stat",
    ),
    ("cpu_throttled", {"files": {"/sys/fs/cgroup/cpu.stat": "nr_periods 100\nnr_throttled 9"}}, WARN, "9 of"),
    ("memory_limit", {"files": {"/sys/fs/cgroup/memory.stat": "inactive_file 0"}}, WARN, "97280 of 102400 MiB"),
    (
        "memory_limit",
        {"files": {**JOB, **memory("job/memory", "max", "current")}},
        WARN,
        "/job/memory.current: 19 of 20",
    ),
    ("memory_limit", {"files": memory("memory/memory", "limit_in_bytes", "usage_in_bytes")}, WARN, "19 of 20 MiB"),
    ("numa_balancing", {"files": {"/proc/sys/kernel/numa_balancing": "1"}}, INFO, "2 nodes"),
    ("huge_pages", {"files": {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}}, INFO, "never"),
]

# Variables on the good machine: (check, variables, level, what the evidence and the fix must hold). None: silent.
ENVIRONMENT: list[tuple[str, str, str | None, str, str]] = [
    ("socket_threads", "NCCL_IB_DISABLE=1", WARN, "0x15b3", "compare with nccl-tests"),
    ("socket_limits", "NCCL_SOCKET_NTHREADS=8 NCCL_NSOCKS_PERTHREAD=9", WARN, "72 sockets", "NSOCKS_PERTHREAD=8"),
    ("socket_limits", "NCCL_SOCKET_NTHREADS=8 NCCL_NSOCKS_PERTHREAD=8", None, "", ""),
    ("socket_limits", "NCCL_SOCKET_NTHREADS=17", WARN, "NCCL_SOCKET_NTHREADS=17", "NTHREADS=16 at most"),
    ("socket_limits", "NCCL_SOCKET_NTHREADS=many", ERROR, "many", "set NCCL_SOCKET_NTHREADS to a whole number"),
    ("socket_unused", "NCCL_NSOCKS_PERTHREAD=4", WARN, "unset", "export NCCL_SOCKET_NTHREADS=4 as well"),
    ("socket_unused", "NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=0", WARN, "NTHREADS: 0", "as well"),
    ("interface_missing", "NCCL_SOCKET_IFNAME=bond", ERROR, "up here: eth0, lo", "in NCCL_SOCKET_IFNAME"),
    ("interface_missing", "NCCL_SOCKET_IFNAME==eth", ERROR, "=eth", "one of these in NCCL_SOCKET_IFNAME"),
    ("interface_missing", "GLOO_SOCKET_IFNAME=eth", ERROR, "eth missing", "(whole names"),
    ("interface_missing", "NCCL_SOCKET_IFNAME=^docker GLOO_SOCKET_IFNAME=eth0", None, "", ""),
    ("loopback", "GLOO_SOCKET_IFNAME=lo", INFO, "GLOO_SOCKET_IFNAME=lo", "export GLOO_SOCKET_IFNAME=eth0"),
    ("loopback", "NCCL_SOCKET_IFNAME=lo WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", ERROR, "takes lo", "NCCL_SOCKET_IFNAME=eth0"),
    ("rdma_unused", "NCCL_IB_DISABLE=1", WARN, "NCCL_IB_DISABLE=1; active: mlx5_0", "unset NCCL_IB_DISABLE"),
    ("rdma_unused", "NCCL_IB_DISABLE=0", None, "", ""),
    ("rdma_unused", "NCCL_NET=Socket", WARN, "NCCL_NET=Socket; active: mlx5_0", "unset NCCL_NET"),
    ("p2p_disabled", "NCCL_P2P_DISABLE=1", WARN, "environment: NCCL_P2P_DISABLE=1", "unset NCCL_P2P_DISABLE"),
    ("p2p_disabled", "NCCL_P2P_DISABLE=0 NCCL_P2P_LEVEL=NVL", None, "", ""),
    ("p2p_disabled", "NCCL_P2P_LEVEL=loc", WARN, "NCCL_P2P_LEVEL=loc", "unset NCCL_P2P_LEVEL"),
    ("shm_disabled", "NCCL_SHM_DISABLE=1", WARN, "NCCL_SHM_DISABLE=1", "unset NCCL_SHM_DISABLE; give the container"),
    ("gdr_limited", "NCCL_NET_GDR_LEVEL=LOC", WARN, "LOC", "unset NCCL_NET_GDR_LEVEL, or set it to PXB or PHB"),
    ("gdr_limited", "NCCL_NET_GDR_READ=0", WARN, "NCCL_NET_GDR_READ=0", "unset NCCL_NET_GDR_READ"),
    ("gdr_limited", "NCCL_NET_GDR_READ=1", None, "", ""),
    ("blocking", "CUDA_LAUNCH_BLOCKING=1", WARN, "CUDA_LAUNCH_BLOCKING=1", "unset CUDA_LAUNCH_BLOCKING"),
    ("torch_detail", "TORCH_DISTRIBUTED_DEBUG=DETAIL", WARN, "DETAIL", "set it to INFO, or unset it"),
    ("torch_detail", "TORCH_DISTRIBUTED_DEBUG=INFO", None, "", ""),
    ("debug_output", "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL", INFO, "COLL", "export NCCL_DEBUG=WARN"),
    ("debug_output", "NCCL_DEBUG=TRACE", INFO, "TRACE", "export NCCL_DEBUG=WARN"),
    ("debug_output", "NCCL_DEBUG=INFO", None, "", ""),
    ("tuning_pinned", "NCCL_ALGO=Tree", INFO, "NCCL_ALGO=Tree", "compare with NCCL_ALGO unset"),
    ("tuning_pinned", "NCCL_MAX_NCHANNELS=1", WARN, "NCCL_MAX_NCHANNELS=1", "compare with NCCL_MAX_NCHANNELS unset"),
    ("socket_buffers_fixed", "NCCL_SOCKET_RCVBUF=67108864", WARN, "max: 33554432", "or unset NCCL_SOCKET_RCVBUF"),
    ("cpu_limit", "NCCL_SOCKET_NTHREADS=16", WARN, "2 ranks x 18", "more cores"),
    ("open_files", "WORLD_SIZE=2000", WARN, "2000 ranks", "ulimit -n 65536"),
]

# Check → (what is different, why it can't look).
BLIND: list[tuple[str, dict[str, Any], str]] = [
    ("peer_memory", {"files": NO_GPU}, "no NVIDIA GPU"),
    ("peer_memory", {"files": NO_RDMA}, "no active InfiniBand"),
    ("memlock", {"files": NO_RDMA}, "no active InfiniBand"),
    ("acs", {"files": {f"{PCI}/0000:00:01.0/config": config_space(0, short=True)}}, "run as root"),
    ("acs", {"files": {f"{PCI}/0000:00:01.0": None}}, "no PCIe bridge"),
    ("link_speed", {"files": {f"{CARD}/speed": "-1"}}, "the driver tells none"),
    ("pcie_link", {"files": {f"{CARD}/device": None}}, "no network card on PCIe"),
    ("mtu", {"files": {CARD: None}}, "no network interface beside loopback"),
    ("shaped_link", {"qdisc": None}, "tc is not installed"),
    ("tcp_retransmits", {"files": {"/proc/net/snmp": None}}, "no such file"),
    ("tcp_buffers", {"files": {"/proc/sys/net/ipv4/tcp_rmem": "x"}}, "not three numbers"),
    ("cpu_throttled", {"files": {"/sys/fs/cgroup/cpu.stat": None}}, "no such file"),
    ("numa", {"files": {f"{PCI}/0000:01:00.0/numa_node": "-1", f"{PCI}/0000:02:00.0/numa_node": "-1"}}, "not told"),
]


def level_of(diagnosis: Examination, name: str) -> list[str]:
    return [finding.level for finding in diagnosis.findings if finding.check == name]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return host(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize(("name", "variables", "level", "evidence", "change"), ENVIRONMENT)
def test_variables_of_the_environment(
    name: str, variables: str, level: str | None, evidence: str, change: str, good: Host
) -> None:
    environment = dict(variable.split("=", 1) for variable in variables.split())
    findings = [finding for finding in examine(replace(good, env=environment)).findings if finding.check == name]
    assert [finding.level for finding in findings] == ([level] if level else [])
    assert all(evidence in finding.evidence and change in finding.change for finding in findings)


@pytest.mark.parametrize(
    ("name", "change", "level", "evidence"), FIRES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_check_fires(name: str, change: dict[str, Any], level: str, evidence: str, tmp_path: Path) -> None:
    found = [finding for finding in examine(host(tmp_path, **change)).findings if finding.check == name]
    assert [finding.level for finding in found] == [level]
    assert evidence in found[0].evidence
    assert found[0].costs
    assert found[0].change


def test_every_check_of_the_machine_has_a_case_that_makes_it_fire() -> None:
    assert {name for name, *_ in [*FIRES, *ENVIRONMENT]} == {check.name for check in MACHINE}


def test_every_check_looks_at_a_good_machine_and_finds_nothing(good: Host) -> None:
    diagnosis = examine(good)
    assert diagnosis.passed == tuple(check.name for check in MACHINE)
    assert not diagnosis.findings


# What is close to firing, and must not.
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("socket_threads", {"files": {**NO_RDMA, f"{CARD}/device/vendor": "0x1d0f"}}),
        ("socket_threads", {"files": {**NO_RDMA, f"{CARD}/device/vendor": "0x1ae0"}}),
        ("socket_threads", {"files": NO_RDMA, "env": {"NCCL_SOCKET_NTHREADS": "4"}}),
        ("socket_unused", {"env": {"NCCL_NSOCKS_PERTHREAD": "4"}, "files": {f"{CARD}/device/vendor": "0x1d0f"}}),
        ("hostname_loopback", {"resolve": lambda name: ["127.0.1.1"], "env": {"GLOO_SOCKET_IFNAME": "eth0"}}),
        ("hostname_loopback", {"resolve": lambda name: ["127.0.1.1", "10.0.0.7"]}),
        ("mtu", {"files": {f"{CARD}/mtu": "8896"}}),
        ("mtu", {"files": {f"{CARD}/mtu": "1500", f"{CARD}/speed": "1000"}}),
        (
            "peer_memory",
            {"files": {"/sys/module/nvidia_peermem": None, "/sys/kernel/mm/memory_peers/nv_mem/version": "1"}},
        ),
        (
            "peer_memory",
            {
                "files": {
                    "/sys/module/nvidia_peermem": None,
                    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1",
                }
            },
        ),
        ("acs", {"files": {f"{PCI}/0000:00:01.0/config": config_space(0x40)}}),
        ("iommu", {"files": {"/proc/cmdline": "quiet", "/sys/class/iommu/dmar0": None}}),
        ("tcp_retransmits", {"files": {"/proc/net/snmp": "Tcp: OutSegs RetransSegs\nTcp: 100 90"}}),
    ],
)
def test_check_stays_silent(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    assert not level_of(examine(host(tmp_path, **change)), name)


@pytest.mark.parametrize(("name", "change", "why"), BLIND)
def test_check_says_why_it_could_not_look(name: str, change: dict[str, Any], why: str, tmp_path: Path) -> None:
    diagnosis = examine(host(tmp_path, **change))
    assert why in dict(diagnosis.unseen)[name]
    assert name not in diagnosis.passed


def test_no_check_is_lost(tmp_path: Path) -> None:
    diagnosis = examine(host(tmp_path, files={**NO_GPU, "/proc/cmdline": "quiet"}))
    seen = (
        {finding.check for finding in diagnosis.findings}
        | set(diagnosis.passed)
        | {name for name, _ in diagnosis.unseen}
    )
    assert seen == {check.name for check in (*MACHINE, *LOG)}


def test_an_empty_machine_gives_reasons_and_no_traceback(tmp_path: Path) -> None:
    bare = Host(root=tmp_path, env={}, resolve=lambda name: ["10.0.0.7"], limits={"memlock": 1.0, "nofile": 65536.0})
    diagnosis = examine(bare)
    assert not diagnosis.findings
    assert len(diagnosis.unseen) > 20


def test_garbage_in_every_file_gives_reasons_and_no_traceback(tmp_path: Path) -> None:
    from tests.comm.fake_host import GOOD

    files = dict.fromkeys(GOOD, "§ not what it should be\n\n: -1 x")
    diagnosis = examine(host(tmp_path, files=files))
    assert diagnosis.unseen


def test_worst_findings_come_first(tmp_path: Path) -> None:
    diagnosis = examine(host(tmp_path, files={f"{CARD}/mtu": "1500", "/dev/infiniband": None, "/proc/cmdline": ""}))
    assert [finding.level for finding in diagnosis.findings] == [ERROR, WARN, INFO]
    assert diagnosis.bad


def test_information_alone_is_not_bad(tmp_path: Path) -> None:
    diagnosis = examine(host(tmp_path, files={f"{CARD}/mtu": "1500"}))
    assert [finding.level for finding in diagnosis.findings] == [INFO]
    assert not diagnosis.bad


def test_what_a_check_found_before_it_went_blind_is_kept(tmp_path: Path) -> None:
    files = {
        f"{PCI}/0000:00:01.0/config": config_space(0x04),
        f"{PCI}/0000:00:02.0/class": "0x060400",
        f"{PCI}/0000:00:02.0/config": config_space(0, short=True),
    }
    diagnosis = examine(host(tmp_path, files=files))
    assert level_of(diagnosis, "acs") == [WARN]
    assert "1 of 2 bridges" in dict(diagnosis.unseen)["acs"]


def test_a_check_that_breaks_does_not_end_the_others() -> None:
    def broken(host: Host) -> Any:
        yield Hit("first", "A")
        int("x")

    findings, reason = look(Check("broken", WARN, "", "", "unset {}", broken), Host())
    assert [(finding.evidence, finding.change) for finding in findings] == [("first", "unset A")]
    assert "broken could not make sense" in reason


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=eth0", ["docker0", "eth1", "ib0", "lo"]),
        ("ib,eth1", ["eth1", "ib0"]),
        ("", []),
    ],
)
def test_interfaces_are_matched_as_nccl_does(wanted: str, expected: list[str]) -> None:
    assert matching(["docker0", "eth0", "eth1", "ib0", "lo"], wanted) == expected


def test_nccl_prefers_ib_and_leaves_out_interfaces_without_an_address(tmp_path: Path) -> None:
    routes = {"/proc/net/route": "Iface\nib0\t0\neth0\t0\n", **interface("ib0"), **interface("ens9")}
    machine = host(tmp_path, files=routes)
    assert machine.interfaces() == ["eth0", "ib0", "lo"]
    assert machine.chosen() == ["ib0"]


def test_acs_ends_on_a_list_that_points_to_itself() -> None:
    space = bytearray(config_space(0x04))
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert acs_bits(bytes(space)) == []
    assert acs_bits(config_space(0x0C)) == ["ReqRedir", "CmpltRedir"]


def test_the_real_machine_can_be_looked_at() -> None:
    diagnosis = examine(Host())
    assert len(diagnosis.passed) + len(diagnosis.unseen) > 20
    assert set(limits()) == {"memlock", "nofile"}


def test_a_command_that_is_not_there_or_fails_is_a_reason() -> None:
    with pytest.raises(NotSeen, match="no-such-command is not installed"):
        run_command(["no-such-command"])
    with pytest.raises(NotSeen, match="false failed"):
        run_command(["false"])


def test_the_manual_lists_every_check_as_the_registry_has_it() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/doctor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+?) \|", page, re.MULTILINE)
    assert rows == [(check.name, check.level, check.title) for check in (*MACHINE, *LOG)]
