"""The machine as the doctor sees it: files under one root, commands through one runner, all of it replaceable.

A file that can't be read is never an empty file: `read` says why by raising `NotSeen`, and the report repeats it. What
a check does see it yields as a `Hit`, see `accel.comm.doctor.examination`.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from accel.profiler.errors import AccelError
from accel.profiler.host import usable_cores

INFO, WARN, ERROR = LEVELS = ("info", "warn", "error")

Runner = Callable[[Sequence[str]], str]


class NotSeen(AccelError):
    """Something could not be looked at; the text says what and why."""


class Hit(NamedTuple):
    """What a check saw, before the words of its row are added."""

    evidence: str
    """What was read where."""
    about: str = ""
    """What takes the place of `{}` in the row's fix."""
    fix: str = ""
    """Where it differs from the row's."""
    level: str = ""
    """Where it differs from the row's."""


def run_command(command: Sequence[str]) -> str:
    """Return what `command` prints within 10 s.

    Raises:
        NotSeen: if it is not installed, fails or takes longer.
    """
    if shutil.which(command[0]) is None:
        raise NotSeen(f"{command[0]} is not installed")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except subprocess.TimeoutExpired:
        raise NotSeen(f"{command[0]} did not answer within 10 s") from None
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotSeen(f"{command[0]} failed: {error}") from None
    return done.stdout


def resolve(name: str) -> list[str]:
    """Return the addresses of a host name, [] if it has none."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def limits() -> dict[str, float]:
    """Return this process's soft limits: bytes of locked memory and number of open files, `inf` for none."""
    soft = {
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
    return {name: float("inf") if value == resource.RLIM_INFINITY else float(value) for name, value in soft.items()}


def file_system_bytes(path: Path) -> int:
    """Return the bytes of the file system that a path is on.

    Raises:
        NotSeen: if there is no such path.
    """
    try:
        system = os.statvfs(path)
    except OSError as error:
        raise NotSeen(f"{path}: {(error.strerror or str(error)).lower()}") from None
    return system.f_frsize * system.f_blocks


@dataclass
class Host:
    """Where the checks look.

    Args:
        root: what stands for `/`.
        env: environment variables; those that the log shows come on top, see `settings`.
        run: runs a command and returns its output.
        resolve: host name → addresses.
        hostname: this machine's name.
        limits: `memlock` in bytes and `nofile`.
        cores: that this process may use.
        space: path → bytes of its file system.
        logged: settings of the environment that an NCCL log shows.
    """

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Runner = run_command
    resolve: Callable[[str], list[str]] = resolve
    hostname: str = field(default_factory=socket.gethostname)
    limits: Mapping[str, float] = field(default_factory=limits)
    cores: int = field(default_factory=usable_cores)
    space: Callable[[Path], int] = file_system_bytes
    logged: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return where the absolute path `name` is under the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str, default: str | None = None) -> str:
        """Return a file's text without white space at its ends, or `default` where its absence says nothing.

        Raises:
            NotSeen: if there is no such file or it can't be read, and no default.
        """
        try:
            return self.data(name).decode(errors="replace").strip()
        except NotSeen:
            if default is None:
                raise
            return default

    def number(self, name: str) -> int:
        """Return the whole number in a file.

        Raises:
            NotSeen: if it can't be read or holds something else.
        """
        text = self.read(name)
        try:
            return int(text, 0)
        except ValueError:
            raise NotSeen(f"{name}: holds {text[:20]!r}, not a number") from None

    def known(self, name: str, least: int = 0) -> int | None:
        """Return the whole number in a file, None where there is none or it is less: a driver's word for unknown."""
        try:
            number = self.number(name)
        except NotSeen:
            return None
        return number if number >= least else None

    def data(self, name: str) -> bytes:
        """Return a file's bytes.

        Raises:
            NotSeen: if it can't be read.
        """
        try:
            return self.path(name).read_bytes()
        except OSError as error:
            raise NotSeen(f"{name}: {(error.strerror or str(error)).lower()}") from None

    def entries(self, name: str) -> list[str]:
        """Return the sorted entries of a folder, [] if there is none."""
        try:
            return sorted(entry.name for entry in self.path(name).iterdir())
        except OSError:
            return []

    def has(self, name: str) -> bool:
        """Return whether a file or folder is there."""
        return self.path(name).exists()

    def set(self, name: str) -> str:
        """Return a setting: what the log shows, else the environment variable, else ''."""
        return self.logged.get(name, self.env.get(name, "")).strip()

    def where(self, name: str) -> str:
        """Return where a setting comes from, as evidence."""
        return f"{'log' if name in self.logged else 'environment'}: {name}={self.set(name)}"

    def whole(self, name: str) -> int | None:
        """Return a setting as a whole number, None where it is unset or none."""
        try:
            return int(self.set(name))
        except ValueError:
            return None

    # What several checks ask for

    def gpus(self) -> list[str]:
        """Return the PCI addresses of NVIDIA GPUs."""
        bus = "/sys/bus/pci/devices"
        displays = [
            device
            for device in self.entries(bus)
            if self.read(f"{bus}/{device}/class", "").startswith(("0x0300", "0x0302"))
        ]
        gpus = [device for device in displays if self.read(f"{bus}/{device}/vendor", "") == "0x10de"]
        return gpus or self.entries("/proc/driver/nvidia/gpus")

    def adapters(self) -> list[str]:
        """Return the InfiniBand and RoCE devices that have an active port."""
        return [
            name
            for name in self.entries("/sys/class/infiniband")
            if any(
                "ACTIVE" in self.read(f"/sys/class/infiniband/{name}/ports/{port}/state", "")
                for port in self.entries(f"/sys/class/infiniband/{name}/ports")
            )
        ]

    def interfaces(self) -> list[str]:
        """Return the network interfaces that are up and, as far as the kernel reports, have an address."""
        every = [name for name in self.entries("/sys/class/net") if self.has(f"/sys/class/net/{name}/operstate")]
        states = {name: self.read(f"/sys/class/net/{name}/operstate", "") for name in every}
        up = [name for name in every if states[name] in ("up", "unknown")]
        # IPv4 routes begin with the interface, IPv6 addresses end with it.
        rows = [(line.split(), 0) for line in self.read("/proc/net/route", "").splitlines()]
        rows += [(line.split(), -1) for line in self.read("/proc/net/if_inet6", "").splitlines()]
        with_address = {words[place] for words, place in rows if words} | {"lo"}
        addressed = [name for name in up if name in with_address]
        return addressed if set(addressed) - {"lo"} else up

    def chosen(self) -> list[str]:
        """Return the interfaces that NCCL takes, by its own rules.

        NCCL_SOCKET_IFNAME holds prefixes, exact names after `=`, and excludes after `^`. Without it NCCL prefers names
        that begin with `ib`, then takes everything but `docker`, `lo` and `virbr`, then these three in turn.
        """
        up = self.interfaces()
        if wanted := self.set("NCCL_SOCKET_IFNAME"):
            return matching(up, wanted)
        choices = (matching(up, pattern) for pattern in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"))
        return next(filter(None, choices), [])

    def need(self, what: str) -> list[str]:
        """Return what a check is about: a "gpu", an "adapter", or an "interface" that NCCL takes, beside loopback.

        Raises:
            NotSeen: if there is none.
        """
        listed, why = {
            "gpu": (self.gpus, "no NVIDIA GPU here (/sys/bus/pci/devices, /proc/driver/nvidia/gpus)"),
            "adapter": (self.adapters, "no active InfiniBand or RoCE device here (/sys/class/infiniband)"),
            "interface": (self.chosen, "no network interface beside loopback is up (/sys/class/net)"),
        }[what]
        if names := [name for name in listed() if name != "lo"]:
            return names
        raise NotSeen(why)


def matching(names: Sequence[str], wanted: str) -> list[str]:
    """Return those of `names` that NCCL_SOCKET_IFNAME=`wanted` selects."""
    exclude, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    listed = [word.strip() for word in wanted.lstrip("^").lstrip("=").split(",") if word.strip()]

    def hit(name: str) -> bool:
        return name in listed if exact else any(name.startswith(prefix) for prefix in listed)

    return [name for name in names if hit(name) is not exclude]
