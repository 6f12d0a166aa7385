"""Checks of network interfaces and of the kernel's TCP settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from accel.comm.doctor.host import ERROR, WARN, Hit, Host, NotSeen

ROUND_TRIP_S = 1e-3  # between machines of one region of a cloud
_LEAST_CLOUD_JUMBO = 8000  # Google 8896, AWS 9001, Azure 9000 less encapsulation
_FAST_MBIT = 10_000
# The kernel's own: what tcp_rmem and tcp_wmem end with on a machine that nobody changed.
_DEFAULT_WINDOW = {"tcp_rmem": 6_291_456, "tcp_wmem": 4_194_304}


def link_speed(host: Host) -> Iterator[Hit]:
    """The chosen interface's speed is below another's that is up, or below 1 Gbit/s."""
    chosen = host.need("interface")
    speeds = {
        name: _speed_mbit(host, name)
        for name in host.interfaces()
        if name != "lo" and host.has(f"/sys/class/net/{name}/device")
    }
    best = max(((speed, name) for name, speed in speeds.items() if speed), default=(0, ""))
    used = {name: speed for name in chosen if (speed := _speed_mbit(host, name))}
    for name, speed in used.items():
        evidence = f"/sys/class/net/{name}/speed: {speed} Mbit/s"
        if speed < best[0]:
            yield Hit(f"{evidence}; {best[1]}: {best[0]} Mbit/s", best[1])
        elif speed < 1000:
            yield Hit(evidence, fix="look at cable, port and autonegotiation", level=ERROR)
    if not used:
        raise NotSeen(f"/sys/class/net/{chosen[0]}/speed: the driver tells none; accel bench comm measures it")


def _speed_mbit(host: Host, interface: str) -> int | None:
    """Return the link speed in Mbit/s, None where the driver reports none (virtio, bridges)."""
    try:
        speed = host.number(f"/sys/class/net/{interface}/speed")
    except NotSeen:
        return None
    return speed if speed > 0 else None


def pcie_link(host: Host) -> Iterator[Hit]:
    """current_link_speed or current_link_width of a network card below its max_."""
    compared = 0
    for name in host.interfaces():
        for what in ("link_speed", "link_width"):
            file = f"/sys/class/net/{name}/device/current_{what}"
            now, most = host.read(file, ""), host.read(file.replace("current", "max"), "")
            if (current := _leading(now)) is not None and (largest := _leading(most)) is not None:
                compared += 1
                if current < largest:
                    yield Hit(f"{file}: {now}, max_{what}: {most}")
    if not compared:
        raise NotSeen("no network card on PCIe tells its link (/sys/class/net/*/device/current_link_speed)")


def _leading(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def mtu(host: Host) -> Iterator[Hit]:
    """MTU below 8000 on a link of 10 Gbit/s or more."""
    for name in host.need("interface"):
        speed, size = _speed_mbit(host, name), host.number(f"/sys/class/net/{name}/mtu")
        if size < _LEAST_CLOUD_JUMBO and speed is not None and speed >= _FAST_MBIT:
            yield Hit(f"/sys/class/net/{name}/mtu: {size} at {speed} Mbit/s", name)


def mtu_differs(host: Host) -> Iterator[Hit]:
    """The chosen interfaces, or an interface and its members, have different MTUs."""
    chosen = host.need("interface")
    members = [entry.removeprefix("lower_") for name in chosen for entry in _lower(host, name)]
    sizes = {name: host.number(f"/sys/class/net/{name}/mtu") for name in dict.fromkeys([*chosen, *members])}
    if len(set(sizes.values())) > 1:
        yield Hit(", ".join(f"/sys/class/net/{name}/mtu: {size}" for name, size in sizes.items()))


def _lower(host: Host, name: str) -> list[str]:
    return [entry for entry in host.entries(f"/sys/class/net/{name}") if entry.startswith("lower_")]


def link_errors(host: Host) -> Iterator[Hit]:
    """Errors and drops above one packet in ten thousand."""
    for name in host.need("interface"):
        folder = f"/sys/class/net/{name}/statistics"
        for direction in ("rx", "tx"):
            packets = host.number(f"{folder}/{direction}_packets")
            lost = {
                f"{direction}_{kind}": host.number(f"{folder}/{direction}_{kind}") for kind in ("errors", "dropped")
            }
            if packets and sum(lost.values()) > max(packets * 1e-4, 10):
                counts = ", ".join(f"{kind}: {number}" for kind, number in lost.items())
                yield Hit(f"{folder}/{counts} of {packets} packets", name)


def tcp_retransmits(host: Host) -> Iterator[Hit]:
    """More than 0.5 % of the segments sent since boot."""
    lines = [line.split() for line in host.read("/proc/net/snmp").splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2:
        raise NotSeen("/proc/net/snmp: no line of TCP")
    counts = dict(zip(lines[0][1:], map(int, lines[1][1:]), strict=False))
    again, sent = counts.get("RetransSegs", 0), counts.get("OutSegs", 0)
    if sent > 10_000 and again > 0.005 * sent:
        yield Hit(f"/proc/net/snmp: RetransSegs {again} of OutSegs {sent} ({100 * again / sent:.1f} %)")


def tcp_buffers(host: Host) -> Iterator[Hit]:
    """Largest window of tcp_rmem or tcp_wmem below link speed x 1 ms; below the kernel's own without a speed."""
    speeds = [speed for name in host.chosen() if (speed := _speed_mbit(host, name))]
    for name, default in _DEFAULT_WINDOW.items():
        file = f"/proc/sys/net/ipv4/{name}"
        try:
            largest = int(host.read(file).split()[-1])
        except (ValueError, IndexError):
            raise NotSeen(f"{file}: not three numbers") from None
        needed = int(max(speeds) * 1e6 / 8 * ROUND_TRIP_S) if speeds else default
        if largest < needed:
            why = f"{max(speeds)} Mbit/s x 1 ms round trip" if speeds else "the kernel's own maximum"
            values = f"{name}='4096 131072 {max(2 * needed, 16 << 20)}'"
            yield Hit(f"{file}: at most {largest} bytes; {needed} is {why}", values)
    if host.read("/proc/sys/net/ipv4/tcp_moderate_rcvbuf", "") == "0":
        yield Hit("/proc/sys/net/ipv4/tcp_moderate_rcvbuf: 0", "tcp_moderate_rcvbuf=1")


def socket_buffers_fixed(host: Host) -> Iterator[Hit]:
    """NCCL_SOCKET_RCVBUF or NCCL_SOCKET_SNDBUF above rmem_max or wmem_max."""
    for variable, limit in (("NCCL_SOCKET_RCVBUF", "rmem_max"), ("NCCL_SOCKET_SNDBUF", "wmem_max")):
        wanted = host.whole(variable)
        if wanted is None:
            continue
        most = host.number(f"/proc/sys/net/core/{limit}")
        if wanted > most:
            evidence = f"{host.where(variable)}; /proc/sys/net/core/{limit}: {most}"
            yield Hit(evidence, f"{limit}={wanted}, or unset {variable}")


_QDISC = re.compile(r"^qdisc (tbf|htb|netem|cake|police)\b(.*)$", re.MULTILINE)
_RATE = re.compile(r"\brate ([\d.]+)([KMG]?)bit")
_BURST = re.compile(r"\bburst ([\d.]+)([KMG]?)b\b")
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_POWERS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30}


def shaped_link(host: Host) -> Iterator[Hit]:
    """`tc qdisc` shows tbf, htb, netem or cake; a warning if its bucket holds less than 1 ms."""
    for name in host.need("interface"):
        for kind, rest in _QDISC.findall(host.run(["tc", "qdisc", "show", "dev", name])):
            evidence = f"tc qdisc show dev {name}: {kind} {rest.strip()[:70]}"
            rate = _RATE.search(rest)
            if rate and _small_bucket(rate, _BURST.search(rest)):
                larger = f"tc qdisc replace dev {name} root tbf rate {rate[1]}{rate[2]}bit burst 256kb latency 50ms"
                yield Hit(evidence, fix=larger, level=WARN)
            else:
                yield Hit(evidence)


def _small_bucket(rate: re.Match[str], burst: re.Match[str] | None) -> bool:
    """Return whether the bucket holds less than 1 ms."""
    bytes_per_ms = float(rate[1]) * _THOUSANDS[rate[2]] / 8 * 1e-3
    return burst is not None and float(burst[1]) * _POWERS[burst[2]] < bytes_per_ms
