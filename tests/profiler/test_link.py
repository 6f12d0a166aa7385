"""Which interface joins the hosts, from played routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.profiler.system import link

ROUTES = """\
Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0
ib0 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0
"""


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    path = tmp_path / "route"
    path.write_text(ROUTES)
    return path


@pytest.mark.parametrize(("master", "name"), [("192.168.1.7", "ib0"), ("8.8.8.8", "eth0"), ("", "")])
def test_the_narrowest_route_to_the_master_is_taken(routes: Path, master: str, name: str) -> None:
    assert link.interface(master, routes) == name


def test_a_system_without_routes_names_none(tmp_path: Path) -> None:
    assert link.interface("192.168.1.7", tmp_path / "gone") == ""


@pytest.mark.parametrize(("value", "name"), [("bond0", "bond0"), ("eth1,eth2", "eth1"), ("=eth1", "eth1"), ("^lo", "")])
def test_a_variable_chooses(routes: Path, monkeypatch: pytest.MonkeyPatch, value: str, name: str) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)

    assert link.interface("192.168.1.7", routes) == name


@pytest.mark.parametrize(("text", "words"), [("1000\n", ", 1000 Mbit/s"), ("-1\n", ""), (None, "")])
def test_speed_is_what_the_interface_says(tmp_path: Path, text: str | None, words: str) -> None:
    (tmp_path / "eth0").mkdir()
    if text is not None:
        (tmp_path / "eth0" / "speed").write_text(text)

    assert link._speed("eth0", tmp_path) == words


def test_one_host_needs_no_link() -> None:
    assert link.describe(2, 1) == "the 2 ranks are on one host"
