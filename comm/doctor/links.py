"""Checks of network interfaces and of the kernel's TCP settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from accel.comm.doctor.checks import ERROR, INFO, WARN, Found, check
from accel.comm.doctor.host import Host, NotSeen

ROUND_TRIP_S = 1e-3  # between machines of one region of a cloud
_JUMBO = 9000
_LEAST_CLOUD_JUMBO = 8000  # Google 8896, AWS 9001, Azure 9000 less encapsulation
_FAST_MBIT = 10_000
# The kernel's own: what tcp_rmem and tcp_wmem end with on a machine that nobody changed.
_DEFAULT_WINDOW = {"tcp_rmem": 6_291_456, "tcp_wmem": 4_194_304}


@check(
    "link_speed",
    WARN,
    "a slower interface is used than there is",
    costs="the time of every collective between nodes goes with the speed of this link",
)
def link_speed(host: Host) -> Iterator[Found]:
    """The chosen interface's speed is below another's that is up, or below 1 Gbit/s."""
    chosen, told = host.need_chosen(), False
    speeds = {name: host.speed_mbit(name) for name in host.interfaces() if name != "lo" and host.physical(name)}
    best = max(((speed, name) for name, speed in speeds.items() if speed), default=(0, ""))
    for name in chosen:
        speed = host.speed_mbit(name)
        told = told or speed is not None
        file = f"/sys/class/net/{name}/speed: {speed} Mbit/s"
        if speed and speed < best[0]:
            yield Found(f"{file}; {best[1]}: {best[0]} Mbit/s", f"export NCCL_SOCKET_IFNAME={best[1]}")
        elif speed and speed < 1000:
            yield Found(file, "look at cable, port and autonegotiation", level=ERROR)
    if not told:
        raise NotSeen(f"/sys/class/net/{chosen[0]}/speed: the driver tells none; accel bench comm measures it")


@check(
    "pcie_link",
    WARN,
    "a card's PCIe link runs below what card and slot could do",
    costs="the bus, not the network, bounds the card: speed times width is what passes",
)
def pcie_link(host: Host) -> Iterator[Found]:
    """current_link_speed or current_link_width of a network card below its max_."""
    seen = False
    for name in host.interfaces():
        folder = f"/sys/class/net/{name}/device"
        for what in ("link_speed", "link_width"):
            now, most = host.read_or(f"{folder}/current_{what}"), host.read_or(f"{folder}/max_{what}")
            numbers = [_leading(text) for text in (now, most)]
            seen = seen or None not in numbers
            if numbers[0] is not None and numbers[1] is not None and numbers[0] < numbers[1]:
                yield Found(
                    f"{folder}/current_{what}: {now}, max_{what}: {most}",
                    "put the card into a slot with all its lanes; look at the BIOS",
                )
    if not seen:
        raise NotSeen("no network card on PCIe tells its link (/sys/class/net/*/device/current_link_speed)")


def _leading(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


@check(
    "mtu",
    INFO,
    "small packets on a fast link",
    costs="six times as many packets as with jumbo frames for one kernel thread to handle; not measured here",
)
def mtu(host: Host) -> Iterator[Found]:
    """MTU below 8000 on a link of 10 Gbit/s or more."""
    for name in host.need_chosen():
        speed, size = host.speed_mbit(name), host.number(f"/sys/class/net/{name}/mtu")
        if size < _LEAST_CLOUD_JUMBO and speed is not None and speed >= _FAST_MBIT:
            yield Found(
                f"/sys/class/net/{name}/mtu: {size} at {speed} Mbit/s",
                f"ip link set dev {name} mtu {_JUMBO}, if switches and all nodes allow it",
            )


@check(
    "mtu_differs",
    WARN,
    "interfaces that are used together differ in MTU",
    costs="a path with a smaller MTU than its end drops or fragments large packets: the job stalls at large sizes",
)
def mtu_differs(host: Host) -> Iterator[Found]:
    """The chosen interfaces, or an interface and its members, have different MTUs."""
    chosen = host.need_chosen()
    members = [entry.removeprefix("lower_") for name in chosen for entry in _lower(host, name)]
    sizes = {name: host.number(f"/sys/class/net/{name}/mtu") for name in dict.fromkeys([*chosen, *members])}
    if len(set(sizes.values())) > 1:
        yield Found(
            ", ".join(f"/sys/class/net/{name}/mtu: {size}" for name, size in sizes.items()),
            "give them one MTU (ip link set dev NAME mtu N)",
        )


def _lower(host: Host, name: str) -> list[str]:
    return [entry for entry in host.entries(f"/sys/class/net/{name}") if entry.startswith("lower_")]


@check(
    "link_errors",
    WARN,
    "packets are lost at the interface",
    costs="TCP halves its rate at each loss, RoCE sends again from the lost packet on",
)
def link_errors(host: Host) -> Iterator[Found]:
    """Errors and drops above one packet in ten thousand."""
    for name in host.need_chosen():
        folder = f"/sys/class/net/{name}/statistics"
        for way in ("rx", "tx"):
            packets = host.number(f"{folder}/{way}_packets")
            bad = {kind: host.number(f"{folder}/{way}_{kind}") for kind in ("errors", "dropped")}
            if packets and sum(bad.values()) > max(packets * 1e-4, 10):
                counts = ", ".join(f"{way}_{kind}: {number}" for kind, number in bad.items())
                yield Found(
                    f"{folder}/{counts} of {packets} packets",
                    f"look at cable and switch port; more receive buffers: ethtool -G {name} rx 4096",
                )


@check(
    "tcp_retransmits",
    WARN,
    "TCP sends segments again",
    costs="each loss halves a flow's rate; a ring is as fast as its slowest flow (nccl-tests#83)",
)
def tcp_retransmits(host: Host) -> Iterator[Found]:
    """More than 0.5 % of the segments sent since boot."""
    lines = [line.split() for line in host.read("/proc/net/snmp").splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2:
        raise NotSeen("/proc/net/snmp: no line of TCP")
    counts = dict(zip(lines[0][1:], map(int, lines[1][1:]), strict=False))
    again, sent = counts.get("RetransSegs", 0), counts.get("OutSegs", 0)
    if sent > 10_000 and again > 0.005 * sent:
        yield Found(
            f"/proc/net/snmp: RetransSegs {again} of OutSegs {sent} ({100 * again / sent:.1f} %)",
            "look for a congested or shaped link (tc -s qdisc); fewer flows, or net.ipv4.tcp_congestion_control=bbr",
        )


@check(
    "tcp_buffers",
    WARN,
    "TCP's window is too small for the link",
    costs="one flow carries at most window / round trip, whatever the link could do",
)
def tcp_buffers(host: Host) -> Iterator[Found]:
    """Largest window of tcp_rmem or tcp_wmem below link speed x 1 ms; below the kernel's own where no speed is told."""
    speeds = [speed for name in host.chosen() if (speed := host.speed_mbit(name))]
    for name, default in _DEFAULT_WINDOW.items():
        file = f"/proc/sys/net/ipv4/{name}"
        try:
            largest = int(host.read(file).split()[-1])
        except (ValueError, IndexError):
            raise NotSeen(f"{file}: not three numbers") from None
        needed = int(max(speeds) * 1e6 / 8 * ROUND_TRIP_S) if speeds else default
        if largest < needed:
            why = f"{max(speeds)} Mbit/s x 1 ms round trip" if speeds else "the kernel's own maximum"
            yield Found(
                f"{file}: at most {largest} bytes; {needed} is {why}",
                f"sysctl -w net.ipv4.{name}='4096 131072 {max(2 * needed, 16 << 20)}'",
            )
    if host.read_or("/proc/sys/net/ipv4/tcp_moderate_rcvbuf") == "0":
        yield Found("/proc/sys/net/ipv4/tcp_moderate_rcvbuf: 0", "sysctl -w net.ipv4.tcp_moderate_rcvbuf=1")


@check(
    "socket_buffers_fixed",
    WARN,
    "NCCL's socket buffers are larger than the kernel allows",
    costs="the kernel cuts them silently, and a buffer that is set by hand no longer grows by itself",
)
def socket_buffers_fixed(host: Host) -> Iterator[Found]:
    """NCCL_SOCKET_RCVBUF or NCCL_SOCKET_SNDBUF above rmem_max or wmem_max."""
    for variable, limit in (("NCCL_SOCKET_RCVBUF", "rmem_max"), ("NCCL_SOCKET_SNDBUF", "wmem_max")):
        wanted = host.whole(variable)
        if wanted is None:
            continue
        most = host.number(f"/proc/sys/net/core/{limit}")
        if wanted > most:
            yield Found(
                f"{host.where(variable)}; /proc/sys/net/core/{limit}: {most}",
                f"sysctl -w net.core.{limit}={wanted}, or unset {variable}",
            )


_QDISC = re.compile(r"^qdisc (tbf|htb|netem|cake|police)\b(.*)$", re.MULTILINE)
_RATE = re.compile(r"\brate ([\d.]+)([KMG]?)bit")
_BURST = re.compile(r"\bburst ([\d.]+)([KMG]?)b\b")
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_POWERS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30}


@check(
    "shaped_link",
    INFO,
    "the interface is shaped",
    costs=(
        "no collective passes the shaper's rate. A small token bucket costs more than it says: tbf with a burst of "
        "64 KB at 1 Gbit/s passed 950 Mbit/s one way but 503 each way at once, with 256 KB 952 each way (measured)"
    ),
)
def shaped_link(host: Host) -> Iterator[Found]:
    """`tc qdisc` shows tbf, htb, netem or cake; a warning if its bucket holds less than 1 ms."""
    for name in host.need_chosen():
        for kind, rest in _QDISC.findall(host.run(["tc", "qdisc", "show", "dev", name])):
            rate, burst = _RATE.search(rest), _BURST.search(rest)
            small = False
            if rate and burst:
                bytes_per_s = float(rate[1]) * _THOUSANDS[rate[2]] / 8
                small = float(burst[1]) * _POWERS[burst[2]] < bytes_per_s * 1e-3
            change = (
                f"tc qdisc replace dev {name} root tbf rate {rate[1]}{rate[2]}bit burst 256kb latency 50ms"
                if small and rate
                else ""
            )
            yield Found(
                f"tc qdisc show dev {name}: {kind} {rest.strip()[:70]}",
                change or "nothing, if it is meant",
                level=WARN if small else INFO,
            )
