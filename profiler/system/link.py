"""The interface over which this host's gradients reach other hosts, and its nominal speed."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def describe(ranks: int, hosts: int) -> str:
    """Say on how many hosts the ranks are, and what connects them."""
    if hosts < 2:
        return f"the {ranks} ranks are on one host"
    name = interface(os.environ.get("MASTER_ADDR", ""))
    return f"the {ranks} ranks are on {hosts} hosts" + (f", joined over {name}{_speed(name)}" if name else "")


def interface(master: str, routes: Path = Path("/proc/net/route")) -> str:
    """Return the interface that a variable chose, or that the route to the master takes; '' if neither is known."""
    for variable in _CHOSEN:
        if chosen := os.environ.get(variable, "").lstrip("=^").split(",")[0]:
            return "" if os.environ[variable].startswith("^") else chosen
    matches: list[tuple[int, str]] = []
    with contextlib.suppress(OSError, ValueError):
        address = _number(socket.gethostbyname(master)) if master else 0
        for row in routes.read_text(encoding="ascii").splitlines()[1:]:
            fields = row.split()
            destination, mask = int(fields[1], 16), int(fields[7], 16)
            if address and address & mask == destination:
                matches.append((mask.bit_count(), fields[0]))
    return max(matches, default=(0, ""))[1]


def _number(address: str) -> int:
    """Return an IPv4 address as /proc/net/route writes it."""
    return int(struct.unpack("=I", socket.inet_aton(address))[0])


def _speed(name: str, devices: Path = Path("/sys/class/net")) -> str:
    with contextlib.suppress(OSError, ValueError):
        speed = int((devices / name / "speed").read_text(encoding="ascii"))
        return f", {speed} Mbit/s" if speed > 0 else ""
    return ""
