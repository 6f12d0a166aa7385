"""What the lab refuses, on machines without root too."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.comm import lab as lab_module
from benchmarks.comm.lab import Lab, why_not
from benchmarks.comm_hooks import uplink_bytes


@pytest.mark.parametrize("rate", ["fast", "100", "100mbit; reboot", ""])
def test_rate_that_tc_does_not_know_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=r"rate must be one of tc's"):
        Lab(2, rate)


@pytest.mark.parametrize("hosts", [0, 251])
def test_number_of_hosts_is_bounded_by_the_network(hosts: int) -> None:
    with pytest.raises(ValueError, match="hosts must be from 1 to 250"):
        Lab(hosts)


def test_lab_without_tools_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert why_not() == "needs iproute2: ip and tc not found"
    with pytest.raises(RuntimeError, match="no lab: needs iproute2"):
        Lab(2).__enter__()


def test_lab_without_root_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(lab_module.os, "geteuid", lambda: 1000)
    assert why_not() == "needs root to make network namespaces"


@pytest.mark.parametrize(
    ("method", "hosts", "ranks", "share"),
    [
        ("ddp", 2, 1, 1.0),  # a ring of two
        ("ddp", 2, 2, 1.5),
        ("hierarchical exact", 2, 4, 1.0),
        ("hierarchical exact", 4, 8, 1.5),
        ("hierarchical bf16", 2, 2, 0.5),
        ("hierarchical int8", 2, 2, (1 + 4 / 1024) / 4),
        ("1-bit", 2, 1, ((1 / 8 + 4 / 256) / 4 * 1024 + 1) / 1025),  # biases go as they are
    ],
)
def test_bytes_of_an_uplink_follow_the_formulas(method: str, hosts: int, ranks: int, share: float) -> None:
    assert uplink_bytes(method, hosts, ranks, 1_000_000) == pytest.approx(share * 1_000_000)
