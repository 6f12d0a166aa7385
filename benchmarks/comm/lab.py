"""Several hosts on one machine: network namespaces joined by a bridge, every link shaped in both directions.

    with Lab(hosts=2, rate="100mbit") as lab:
        lab.run(["-m", "benchmarks.comm_hooks", "--worker", ...], ranks=2, timeout_s=300)

Needs root and iproute2 (`why_not` tells). Each host has `eth0`, a veth whose other end is on a bridge in a namespace of
its own; `tc tbf` shapes both ends, so up and down alike. What ranks of one host tell each other stays on its loopback.
Delay and loss are those of the machine: the round trip is 0.1 ms.

The bucket of tbf is 256 KB: with 64 KB, segments that the kernel has merged don't fit, and 1 Gbit/s in both directions
at once comes down to half.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[2]
BURST = "256kb"
_numbers = itertools.count()


def why_not() -> str:
    """Return why no lab can be had here, or "" if one can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs iproute2: {' and '.join(missing)} not found"
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    name = f"al{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"needs network namespaces, which this machine refuses: {made.stderr.strip()}"
    shaped = subprocess.run(
        f"tc -n {name} qdisc add dev lo root tbf rate 1gbit burst {BURST} latency 50ms".split(),
        capture_output=True,
        text=True,
        check=False,
    )
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"needs tc's tbf, which this kernel lacks: {shaped.stderr.strip()}" if shaped.returncode else ""


class Finished(NamedTuple):
    """How the launcher of one host ended."""

    code: int
    output: str


class Lab:
    """Hosts that live as long as the `with` block; several labs may exist at once.

    Args:
        hosts: number of hosts, 1 to 250.
        rate: of each host's link, up and down, as tc writes it ("100mbit", "1gbit"); None leaves it unshaped.
    """

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        if not 1 <= hosts <= 250:
            raise ValueError(f"hosts must be from 1 to 250, got {hosts}")
        if rate is not None and not re.fullmatch(r"\d+(\.\d+)?[kmg]?bit", rate):
            raise ValueError(f"rate must be one of tc's like '100mbit' or None, got {rate!r}")
        self.hosts, self.rate = hosts, rate
        # An interface has 15 letters at most, and is in the namespace of the machine for a moment.
        self._prefix = f"al{os.getpid()}x{next(_numbers)}"
        self._running: list[subprocess.Popen[bytes]] = []
        self._ports = itertools.count(29_500)
        self._on_sigterm: Any = None

    def __enter__(self) -> Lab:
        reason = why_not()
        if reason:
            raise RuntimeError(f"no lab: {reason}")
        if threading.current_thread() is threading.main_thread():
            # By default it would end this process at once, and leave ranks and namespaces behind.
            self._on_sigterm = signal.signal(signal.SIGTERM, _leave)
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()
        if self._on_sigterm is not None:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def namespace(self, host: int) -> str:
        """Return the namespace of a host."""
        return f"{self._prefix}h{host}"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{host + 1}"

    def sent_bytes(self, host: int) -> int:
        """Return the bytes that a host has sent over its link, headers of Ethernet and TCP included."""
        shown = _do("ip", "netns", "exec", self.namespace(host), "cat", "/sys/class/net/eth0/statistics/tx_bytes")
        return int(shown)

    def cut(self, host: int) -> None:
        """Cut the link of a host, as a pulled cable does: nothing arrives any more, and nobody is told."""
        _do("ip", "-n", self._switch, "link", "set", f"v{host}", "down")

    def start(
        self,
        arguments: Sequence[str],
        ranks: int | Sequence[int],
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> list[subprocess.Popen[bytes]]:
        """Start `python ARGUMENTS` as ranks under torchrun, one launcher to a host.

        Args:
            arguments: of the interpreter, a script or "-m" and a module first.
            ranks: on each host, or one number for each.
            environ: more variables.
            folder: where the output of host i goes, as `i.log`; default nowhere.
        """
        counts = [ranks] * self.hosts if isinstance(ranks, int) else list(ranks)
        port = next(self._ports)
        started = []
        for host, count in enumerate(counts):
            launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.hosts}", f"--node_rank={host}"]
            launcher += [f"--nproc_per_node={count}", f"--master_addr={self.address(0)}", f"--master_port={port}"]
            command = ["ip", "netns", "exec", self.namespace(host), *launcher, *arguments]
            output = subprocess.DEVNULL if folder is None else (folder / f"{host}.log").open("wb")
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **_ENVIRON, "PYTHONPATH": str(ROOT), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the launcher and its ranks end together
            )
            if not isinstance(output, int):
                output.close()
            started.append(process)
        self._running += started
        return started

    def run(
        self,
        arguments: Sequence[str],
        ranks: int | Sequence[int],
        timeout_s: float,
        environ: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> list[Finished]:
        """Run ranks to their end and return how each host's launcher ended.

        Raises:
            TimeoutError: if one still runs after `timeout_s`; all are ended then.
            RuntimeError: if one failed and `check` is set; the message holds its output.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            processes = self.start(arguments, ranks, environ, folder)
            deadline = time.monotonic() + timeout_s
            try:
                for process in processes:
                    process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                self.stop()
                logs = [(folder / f"{host}.log").read_text(errors="replace")[-3000:] for host in range(self.hosts)]
                raise TimeoutError(f"ranks still ran after {timeout_s:g} s:\n" + "\n".join(logs)) from None
            finally:
                self.stop()
            found = [
                Finished(process.returncode, (folder / f"{host}.log").read_text(errors="replace"))
                for host, process in enumerate(processes)
            ]
        failed = [host for host, one in enumerate(found) if one.code]
        if check and failed:
            raise RuntimeError(f"the ranks of host {failed[0]} failed:\n{found[failed[0]].output[-6000:]}")
        return found

    def stop(self) -> None:
        """End what runs."""
        for process in self._running:
            # The session may outlive its leader.
            for one in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, one)
                except ProcessLookupError:
                    break
                try:
                    process.wait(3 if one == signal.SIGTERM else None)
                except subprocess.TimeoutExpired:
                    continue
        self._running = []

    @property
    def _switch(self) -> str:
        return f"{self._prefix}s"

    def _build(self) -> None:
        switch = self._switch
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            name, port = self.namespace(host), f"v{host}"
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
            # Made where they belong: no name in the machine's own namespace, so that labs can't meet.
            _do("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _do("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "eth0", "up")
            _do("ip", "-n", switch, "link", "set", port, "master", "br0")
            _do("ip", "-n", switch, "link", "set", port, "up")
            if self.rate is not None:
                for where, device in ((name, "eth0"), (switch, port)):
                    shape = ("tbf", "rate", self.rate, "burst", BURST, "latency", "50ms")
                    _do("tc", "-n", where, "qdisc", "replace", "dev", device, "root", *shape)

    def _tear_down(self) -> None:
        self.stop()
        for name in [*(self.namespace(host) for host in range(self.hosts)), self._switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


# gloo takes the first address of the host's name, 127.0.0.1 in every namespace, unless it is told the interface.
_ENVIRON = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
