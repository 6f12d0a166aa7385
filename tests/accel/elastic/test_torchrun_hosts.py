"""Nodes of a torchrun job on hosts of their own, network namespaces, that meet under c10d and under etcd."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.comm.lab import Lab, why_not
from tests.accel.elastic.torchrun_cluster import Host, Nodes, check_that_nodes_come_and_go

pytestmark = [pytest.mark.net, pytest.mark.integration, pytest.mark.skipif(bool(why_not()), reason=why_not())]

_NODES = 3
_STORE = "import time, torch; s = torch.distributed.TCPStore('0.0.0.0', {port}, is_master=True, wait_for_workers=False)"
_FOREVER = "; time.sleep(1e6)"
_ENTER = (
    "import ctypes, os\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.setns(os.open('/run/netns/{name}', os.O_RDONLY), 0x40000000) == 0, os.strerror(ctypes.get_errno())\n"
)
"""0x40000000 is CLONE_NEWNET; os.setns came with Python 3.12."""


def _why_no_etcd() -> str:
    if shutil.which("etcd") is None:
        return "needs etcd (Debian: apt-get install etcd-server)"
    if importlib.util.find_spec("etcd") is None:
        return "needs python-etcd, by which torch's rendezvous asks etcd"
    return ""


def _store_of_torch(port: int, folder: Path) -> list[str]:
    return [sys.executable, "-c", _STORE.format(port=port) + _FOREVER]


def _etcd(port: int, folder: Path) -> list[str]:
    clients, peers = f"http://0.0.0.0:{port}", f"http://127.0.0.1:{port + 1}"
    told = ["--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers]
    alone = ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    # torch asks by the second version of etcd's interface, which the third one has to be told to keep.
    return ["etcd", "--enable-v2", "--data-dir", str(folder / "etcd"), *told, *alone]


STORES = {"c10d": _store_of_torch, "etcd-v2": _etcd}


@contextmanager
def on_hosts(folder: Path, backend: str) -> Iterator[Nodes]:
    """Yield nodes, each on a host of its own; the store is on one more, and outlives them."""
    with Lab(hosts=_NODES + 1) as lab:
        inside = ["ip", "netns", "exec", lab.namespace(_NODES)]
        port = 29_400
        with (folder / "store.log").open("wb") as log:
            store = subprocess.Popen([*inside, *STORES[backend](port, folder)], stdout=log, stderr=log)
        hosts = [Host(lab.address(n), "eth0", _ENTER.format(name=lab.namespace(n))) for n in range(_NODES)]
        nodes = Nodes(folder, backend, f"{lab.address(_NODES)}:{port}", hosts)
        try:
            _wait_for([*inside, "bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"], store, folder / "store.log")
            yield nodes
        finally:
            nodes.end()
            store.kill()
            store.wait()


def _wait_for(reach: list[str], store: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run(reach, capture_output=True, check=False).returncode:
        assert store.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.parametrize(
    "backend",
    ["c10d", pytest.param("etcd-v2", marks=pytest.mark.skipif(bool(_why_no_etcd()), reason=_why_no_etcd()))],
)
def test_a_node_joins_and_one_is_lost_and_one_leaves(backend: str, tmp_path: Path) -> None:
    with on_hosts(tmp_path, backend) as nodes:
        check_that_nodes_come_and_go(nodes)
