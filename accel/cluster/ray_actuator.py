"""Jobs as processes on the nodes of a Ray cluster: Ray places them, and says which nodes are alive.

    change ─▶ placement group, a bundle on each node that the policy chose
           ─▶ an actor in each bundle ─▶ torchrun ─▶ the ranks of that node, which meet at the first one

A placement group can't be resized, so a resize is a checkpoint, a new group and a new start. The job table is the only
truth: nothing is kept in Ray, whose actors end with the scheduler. What their nodes still run of a job is ended before
it is started again. https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accel.cluster.actuators import LOG, RESTARTS, SAVE_S, ClusterUnreachable, Status
from accel.cluster.job_table import JobRow, JobSpec
from accel.cluster.jobs import ClusterNode
from accel.cluster.local_actuator import end_processes
from accel.elastic.local_job import TORCHRUN, LocalJob
from accel.errors import InvalidArgument
from accel.profiler.interruptions import ours

_ANSWER_S = 30.0
"""How long a node may take to answer; then it is lost."""
_PLACED_S = 60.0
"""How long Ray may take to reserve a job's replicas."""
_REACHED_S = 10.0
_STANDALONE = "--standalone"
_NODE_LABEL = "ray.io/node-id"


class RankHost:
    """The ranks of a job on one node; an actor there."""

    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint
        self._job: LocalJob | None = None

    def address(self) -> str:
        """End what a lost scheduler has left of the job here; return a free address of this node."""
        end_processes(self._checkpoint)
        with socket.socket() as free:
            free.bind((_own_host(), 0))
            return "{}:{}".format(*free.getsockname())

    def start(self, spec: JobSpec, replicas: int, nodes: int, meeting: str, is_first: bool) -> None:
        """Start the ranks of this node.

        Args:
            spec: of the job.
            replicas: ranks on this node.
            nodes: of the job.
            meeting: address of the first node, where all meet.
            is_first: whether that is this node.
        """
        launcher = [each for each in TORCHRUN if nodes == 1 or each != _STANDALONE]
        if nodes > 1:
            launcher += [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", "--rdzv-id=accel"]
            launcher += [f"--rdzv-conf=is_host={int(is_first)}", f"--local-addr={_own_host()}"]
        checkpoint = Path(self._checkpoint)
        launcher += [f"--max-restarts={RESTARTS}"]
        output = checkpoint / LOG
        self._job = LocalJob(
            spec.arguments, checkpoint, save_s=SAVE_S, launcher=launcher, work_folder=spec.folder, output=output
        )
        self._job.resize(replicas)

    def status(self) -> int | str:
        """Return the exit status of this node's ranks once they have ended; "running" before, and once stopped."""
        status = self._job.status if self._job else None
        return "running" if status is None else status

    def stop(self) -> None:
        """Have the ranks save and end."""
        if self._job is not None:
            self._job.resize(0)


class RayActuator:
    """Run jobs on a Ray cluster.

    Args:
        address: of the cluster, as `ray.init` takes it; "auto" for that of this machine.
        slots: resource that a replica takes one of. Default: "GPU" on clusters that have one, else "CPU".

    Raises:
        InvalidArgument: if Ray is not installed.
        ClusterUnreachable: if the cluster does not answer.
    """

    def __init__(self, address: str = "auto", slots: str | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise InvalidArgument("Ray must be installed for a Ray cluster: pip install 'ray>=2.60'") from None
        self._ray, self._address, self._resource = ray, address, slots
        self._jobs: dict[str, tuple[Any, list[Any]]] = {}
        """Placement group and actors of each job that runs."""
        self._held: dict[str, Counter[str]] = {}
        """Slots of each job by node, from before they are reserved until after they are released."""
        self._statuses: dict[str, int | None] = {}
        """Of the jobs that have ended; None for one that was stopped."""
        self._lock = threading.Lock()
        with self._connected():
            pass

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Connect if need be.

        Raises:
            ClusterUnreachable: if that fails, or what is done then.
        """
        errors = self._ray.exceptions
        try:
            with self._lock:
                if not self._ray.is_initialized():
                    _reach(self._address)
                    self._jobs.clear()  # actors end with the connection that they were made by
                    self._held.clear()
                    self._ray.init(self._address, namespace="accel", log_to_driver=False, logging_level="ERROR")
            yield
        except errors.RayTaskError as error:  # raised by what was to be done there
            raise InvalidArgument(f"{error.cause}") from None
        except (errors.RayError, OSError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ClusterUnreachable(f"the Ray cluster ({self._address}) does not answer: {reason}") from None

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes that are alive and are to stay so, with the slots that no other work of Ray's has taken.

        One that is being drained, since it is about to be reclaimed, say, counts as gone: so its jobs are saved and
        moved while it is there.
        """
        with self._connected():
            state = self._ray._private.state
            draining, free = state.state.get_draining_nodes(), state.available_resources_per_node()
            alive = [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] not in draining]
        if self._resource is None:
            self._resource = "GPU" if any(node["Resources"].get("GPU") for node in alive) else "CPU"
        own = sum(list(self._held.values()), Counter[str]())  # a copy: other threads place jobs
        nodes = []
        for node in sorted(alive, key=lambda each: str(each["NodeID"])):
            name, resources = node["NodeID"], node["Resources"]
            # What is free lags behind: a job that has just been placed or ended may count twice for a moment.
            slots = min(free.get(name, resources).get(self._resource, 0) + own[name], resources.get(self._resource, 0))
            if slots >= 1:
                nodes.append(ClusterNode(name, int(slots), kind=_kind(resources)))
        return nodes

    def change(self, row: JobRow, nodes: tuple[str, ...]) -> None:
        """Stop a job's ranks after a checkpoint, and start them on their new nodes."""
        with self._connected():
            if row.name in self._jobs:
                self._answers([host.stop.remote() for host in self._jobs[row.name][1]], SAVE_S + _ANSWER_S)
                if self.status(row.name) == 0:
                    return  # it has ended by itself meanwhile
                self._release(row.name, *self._jobs.pop(row.name, (None, [])))
            if nodes:
                self._jobs[row.name] = self._started(row, Counter(nodes))
                self._statuses.pop(row.name, None)
            else:
                self._statuses[row.name] = None

    def _started(self, row: JobRow, replicas: Counter[str]) -> tuple[Any, list[Any]]:
        """Reserve replicas by node, and start the ranks there.

        Raises:
            ClusterUnreachable: if Ray has no room on these nodes in time, or one is lost meanwhile.
        """
        from ray.util.placement_group import placement_group

        self._held[row.name] = replicas
        labels = [{_NODE_LABEL: node} for node in replicas]
        group = placement_group([self._amount(count) for count in replicas.values()], bundle_label_selector=labels)
        hosts = [self._host(group, index, count, row) for index, count in enumerate(replicas.values())]
        try:
            if not _is_placed(group):
                raise ClusterUnreachable(f"Ray has no room for {len(list(replicas.elements()))} replicas; asked again")
            addresses = self._answers([host.address.remote() for host in hosts], SAVE_S + _ANSWER_S)
            begun = [
                host.start.remote(row.spec, count, len(hosts), addresses[0], host is hosts[0])
                for host, count in zip(hosts, replicas.values(), strict=True)
            ]
            if None in (*addresses, *self._answers([*begun, *(host.status.remote() for host in hosts)])[len(begun) :]):
                raise ClusterUnreachable("a node was lost while it was started")
        except BaseException:
            self._release(row.name, group, hosts)
            raise
        return group, hosts

    def _host(self, group: Any, index: int, replicas: int, row: JobRow) -> Any:
        """Make the actor of one node."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ((resource, amount),) = self._amount(replicas).items()
        wanted = {"GPU": {"num_gpus": amount}, "CPU": {"num_cpus": amount}}.get(
            resource, {"resources": {resource: amount}}
        )
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        return self._ray.remote(RankHost).options(**wanted, scheduling_strategy=place).remote(row.spec.checkpoint)

    def _amount(self, replicas: int) -> dict[str, float]:
        return {self._resource or "CPU": float(replicas)}

    def _release(self, name: str, group: Any, hosts: list[Any]) -> None:
        from ray.util.placement_group import remove_placement_group

        for host in hosts:
            self._ray.kill(host)
        if group is not None:
            remove_placement_group(group)
        self._held.pop(name, None)

    def _answers(self, asked: list[Any], limit_s: float = _ANSWER_S) -> list[Any]:
        """Return what hosts answer, None for each that is lost."""
        answers = []
        errors = self._ray.exceptions
        for each in asked:
            try:
                answers.append(self._ray.get(each, timeout=limit_s))
            except (errors.RayActorError, errors.GetTimeoutError):
                answers.append(None)
        return answers

    def status(self, name: str) -> Status:
        """Return how a job ended; it is lost where one of its nodes is."""
        with self._connected():
            if name not in self._jobs:
                return self._statuses.get(name, "lost")
            group, hosts = self._jobs[name]
            answers = self._answers([host.status.remote() for host in hosts])
            if None in answers:
                return "lost"
            failed = [each for each in answers if each not in (0, "running")]
            if not failed and "running" in answers:
                return None
            del self._jobs[name]
            self._release(name, group, hosts)
            self._statuses[name] = failed[0] if failed else 0
            return self._statuses[name]

    def recover(self, row: JobRow) -> bool:
        """End what an earlier scheduler has started of a job, on all nodes."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._connected():
            end = self._ray.remote(end_processes)
            places = [NodeAffinitySchedulingStrategy(node.name, soft=False) for node in self.nodes()]
            asked = [end.options(num_cpus=0, scheduling_strategy=each).remote(row.spec.checkpoint) for each in places]
            for each in asked:
                with contextlib.suppress(self._ray.exceptions.RayError):  # a node that is lost by now runs nothing
                    self._ray.get(each, timeout=SAVE_S + _ANSWER_S)
        return False


def _is_placed(group: Any) -> bool:
    """Wait for a placement group; return whether it is there in time.

    Raises:
        ClusterUnreachable: if it went with Ray's head.
    """
    try:
        return bool(group.wait(_PLACED_S))
    except ours() as error:
        if type(error) is not Exception:  # Ray has no class for this one
            raise
        raise ClusterUnreachable(f"Ray has lost what it was to place: {error}; asked again") from None


def _kind(resources: dict[str, float]) -> str:
    """Return the kind of a node's GPUs, which Ray names `accelerator_type:KIND`."""
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    return kinds[0] if kinds else "gpu"


def _reach(address: str) -> None:
    """Try to connect to a HOST:PORT: Ray itself ends the process minutes later if nobody is there.

    Raises:
        OSError: if nobody answers.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), _REACHED_S).close()


def _own_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
