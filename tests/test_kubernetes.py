"""The manifests agree with themselves, with torchrun and with the script that they start."""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler
from torch.distributed.run import get_args_parser

from tests import manifests, warm
from tests.manifests import FOLDER, JOBS, JOBSETS, MANIFESTS, Manifest, faults, load

pytestmark = pytest.mark.skipif(
    "--shutdown-timeout" not in get_args_parser().format_help(),
    reason=f"the manifests are for a torchrun with --shutdown-timeout, which that of torch {torch.__version__} has not",
)

TRAIN = FOLDER / "train.py"
PAGE = (FOLDER.parent.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
C10D, ETCD, FIXED = (FOLDER / f"{name}.yaml" for name in ("jobset-c10d", "jobset-etcd", "trainjob"))


def file_name(path: object) -> str | None:
    return path.name if isinstance(path, Path) else None


# What stands in them


def test_all_four_are_found_and_named_in_the_manual() -> None:
    assert len(MANIFESTS) == 4
    assert not [path.name for path in [*MANIFESTS, TRAIN] if f"(../examples/kubernetes/{path.name})" not in PAGE]


@pytest.mark.parametrize("path", JOBS, ids=file_name)
def test_a_job_agrees_with_itself(path: Path) -> None:
    assert not faults(load(path))


def changed(manifest: Manifest, place: str, value: object) -> Manifest:
    """Return a copy with `value` at the dotted `place`, or without what is there where `value` is None."""
    manifest = copy.deepcopy(manifest)
    *parents, last = (int(part) if part.isdigit() else part for part in place.split("."))
    inner: object = manifest
    for part in parents:
        inner = inner[part]  # type: ignore[index]
    if value is None:
        del inner[last]  # type: ignore[attr-defined]
    else:
        inner[last] = value  # type: ignore[index]
    return manifest


JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
CONTAINER = f"{POD}.containers.0"
WORKERS = "spec.replicatedJobs.1.template.spec.template.spec.containers.0"


@pytest.mark.parametrize(
    ("path", "place", "value", "fault"),
    [
        (C10D, f"{JOB}.parallelism", 8, "largest number"),
        (C10D, f"{CONTAINER}.command.1", "--nnodes=2:5", "largest number"),
        (C10D, f"{CONTAINER}.command.2", "--nproc-per-node=2", "as many processes"),
        (C10D, f"{CONTAINER}.command.4", "--rdzv-endpoint=elastic-workers-0-0.elastic:29400", "first pod of workers"),
        (C10D, f"{CONTAINER}.ports.0.containerPort", 29500, "another port"),
        (C10D, f"{CONTAINER}.env.0", None, "joins later"),
        (C10D, f"{CONTAINER}.env.0.value", "0", "joins later"),
        (C10D, f"{CONTAINER}.env.2", None, "POD_IP"),
        (C10D, f"{CONTAINER}.volumeMounts.0.mountPath", "/data", "not written to the volume"),
        (C10D, f"{CONTAINER}.volumeMounts.1.name", "memory", "no volume"),
        (C10D, f"{POD}.terminationGracePeriodSeconds", 90, "kills torchrun"),
        (C10D, f"{POD}.restartPolicy", "OnFailure", "restartPolicy Never"),
        (C10D, f"{JOB}.completionMode", "NonIndexed", "completionMode Indexed"),
        (C10D, "metadata.name", "other", "first pod of workers"),
        (C10D, "spec.network.subdomain", "other", "first pod of workers"),
        (ETCD, f"{CONTAINER}.ports.0.containerPort", 2380, "another port"),
        (ETCD, f"{CONTAINER}.readinessProbe.tcpSocket.port", 2380, "probe"),
        (ETCD, f"{CONTAINER}.command.1", "--v2", "v2 API"),
        (ETCD, f"{CONTAINER}.command.3", "--listen-client-urls=http://0.0.0.0:2380", "listens"),
        (ETCD, f"{WORKERS}.command.4", "--rdzv-endpoint=elastic-etcd-workers-0-0.elastic-etcd:2379", "pod of etcd"),
        (ETCD, "spec.successPolicy", None, "does not end"),
        (ETCD, "spec.replicatedJobs.1.dependsOn.0.name", "store", "waits for"),
        (FIXED, "metadata.name", "Fixed", "RFC 1035"),
        (FIXED, "metadata.labels", {}, "queue"),
        (FIXED, "spec.suspend", False, "without Kueue"),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_what_does_not_agree_is_a_fault(path: Path, place: str, value: object, fault: str) -> None:
    assert any(fault in sentence for sentence in faults(changed(load(path), place, value)))


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text(C10D.read_text(encoding="utf-8").replace("completions: 4", "parallelism: 4"), encoding="utf-8")
    with pytest.raises(ValueError, match="must stand once"):
        load(twice)


# What torchrun makes of them


@pytest.mark.parametrize("path", JOBS, ids=file_name)
def test_torchrun_refuses_each_argument_with_a_typo(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = load(path)
    words = manifests.command(manifest)
    options = [index for index, word in enumerate(words[: words.index("train.py")]) if word.startswith("--")]
    assert options
    for index in options:
        words[index] = words[index].replace("--", "--x", 1)
        with pytest.raises(SystemExit):
            manifests.torchrun_arguments(manifest)
        words[index] = words[index].replace("--x", "--", 1)
    manifests.torchrun_arguments(manifest)


@pytest.mark.parametrize(("path", "backend"), [(C10D, "c10d"), (ETCD, "etcd-v2")], ids=file_name)
def test_torchrun_is_elastic_under_a_jobset(path: Path, backend: str) -> None:
    config = manifests.torchrun_config(load(path))
    assert (config.min_nodes, config.max_nodes, config.rdzv_backend) == (2, 4, backend)
    assert config.max_restarts > 0


def test_torchrun_takes_the_size_of_a_trainjob_from_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {"NNODES": "2", "NPROC_PER_NODE": "1", "NODE_RANK": "1", "MASTER_ADDR": "fixed", "MASTER_PORT": "29500"}
    for name, value in trainer.items():
        monkeypatch.setenv(f"PET_{name}", value)
    config = manifests.torchrun_config(load(FIXED))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 1)
    assert config.rdzv_endpoint == "fixed:29500"
    assert config.rdzv_configs["rank"] == 1


@pytest.mark.parametrize("path", JOBSETS, ids=file_name)
def test_torch_reads_the_rendezvous_settings_and_the_variable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load(path)
    config = manifests.torchrun_config(manifest)
    parameters = RendezvousParameters("test", "", "id", config.min_nodes, config.max_nodes, **config.rdzv_configs)
    backend = Mock(spec=RendezvousBackend)
    backend.name = "test"
    handler = create_handler(dist.HashStore(), backend, parameters)
    read = {"join_timeout": handler.settings.timeout.join, "last_call_timeout": handler.settings.timeout.last_call}
    set_there = {name: value for name, value in config.rdzv_configs.items() if name != "timeout"}  # torchrun's own
    assert {name: str(int(value.total_seconds())) for name, value in read.items()} == set_there
    assert handler.use_agent_store
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert not handler.use_agent_store


# The script that they start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def train_alone(checkpoints: Path, steps: int) -> dict[str, object]:
    """Train with one worker; return the checkpoint."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    arguments = [TRAIN, f"--checkpoints={checkpoints}", f"--steps={steps}"]
    done = warm.run(arguments, cwd=FOLDER, environment={**one, "MASTER_PORT": str(free_port())})
    assert done.returncode == 0, done.stderr
    state: dict[str, object] = torch.load(checkpoints / "last.pt")
    return state


def test_the_script_goes_on_from_its_checkpoint_as_if_nothing_had_been(tmp_path: Path) -> None:
    assert train_alone(tmp_path / "resumed", 3)["step"] == 3
    resumed, straight = train_alone(tmp_path / "resumed", 7), train_alone(tmp_path / "straight", 7)
    assert resumed["step"] == straight["step"] == 7
    for name, value in straight["model"].items():  # type: ignore[attr-defined]
        assert torch.equal(resumed["model"][name], value)  # type: ignore[index]


class Pods:
    """Agents on this machine, started as the pods of a manifest would be."""

    def __init__(self, manifest: Manifest, endpoint: str, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | manifests.environment(manifest)
        own = {
            "--rdzv-endpoint": f"--rdzv-endpoint={endpoint}",
            "--local-addr": "--local-addr=127.0.0.1",
            # The pods come at once here: no need to wait for others.
            "--rdzv-conf": "--rdzv-conf=join_timeout=120,last_call_timeout=3",
            "train.py": str(TRAIN),
            "--checkpoints": f"--checkpoints={folder}",
        }
        words = [own.get(word.partition("=")[0], word) for word in manifests.command(manifest)[1:]]
        script = ["--steps=400", "--checkpoint-every=20", "--pause-s=0.05"]
        self._command = [sys.executable, "-m", "torch.distributed.run", *words, *script]

    def start(self) -> subprocess.Popen[bytes]:
        with (self._folder / f"{len(self._running)}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)
            )
        return self._running[-1]

    def lines(self) -> list[str]:
        """Return what rank 0 has said about its checkpoints."""
        logs = [path.read_text(encoding="utf-8") for path in sorted(self._folder.glob("*.log"))]
        said = [line for log in logs for line in log.splitlines() if line.startswith("step ")]
        return sorted(said, key=lambda line: int(line.split()[1]))

    def wait_for(self, wanted: str, after: int = 0) -> int:
        """Wait until a line that ends in `wanted` tells of a step beyond `after`; return the step."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            for line in self.lines():
                if line.endswith(wanted) and (step := int(line.split()[1])) > after:
                    return step
            time.sleep(0.2)
        raise AssertionError(f"{wanted} was not said: {self.lines()}")

    def stop(self) -> None:
        for pod in self._running:
            pod.kill()
            pod.wait()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """Start etcd as the manifest does, on a port of its own; yield its endpoint."""
    pytest.importorskip("etcd", reason="torch's etcd rendezvous needs python-etcd")
    port = free_port()
    words = manifests.jobs(load(ETCD))["etcd"]["template"]["spec"]["containers"][0]["command"]
    words = [word.replace("2379", str(port)).replace("/tmp/etcd", str(tmp_path / "etcd")) for word in words]
    try:
        server = subprocess.Popen([*words, f"--listen-peer-urls=http://127.0.0.1:{free_port()}"])
    except FileNotFoundError:
        pytest.skip("needs etcd 3.4 or 3.5 on PATH")
    yield f"127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("path", JOBSETS, ids=file_name)
def test_a_pod_joins_and_one_is_evicted_without_the_loss_of_a_step(
    path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    endpoint = request.getfixturevalue("etcd") if path == ETCD else f"localhost:{free_port()}"
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    pods = Pods(load(path), endpoint, folder)
    try:
        stay = [pods.start(), pods.start()]
        first = pods.wait_for("workers 2 saved")
        joins = pods.start()
        stopped = pods.wait_for("workers 2 stopped", after=first)
        grown = pods.wait_for("workers 3 saved", after=stopped)
        joins.send_signal(signal.SIGTERM)
        assert joins.wait(120) != 0
        assert pods.wait_for("workers 2 saved", after=grown) > grown
        assert [pod.wait(240) for pod in stay] == [0, 0]
    finally:
        pods.stop()
    steps = [int(line.split()[1]) for line in pods.lines()]
    assert steps[-1] == 400
    # A step that is saved twice has been done twice.
    assert len(steps) == len(set(steps))
    assert {20 * count for count in range(1, 21)} <= set(steps)
