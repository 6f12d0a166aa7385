"""Which ranks share a host."""

from __future__ import annotations

import pytest

from accel.comm.ranks.topology import Topology, from_identities, identity


def told(agent: str, machine: str) -> dict[str, str]:
    return {"agent": agent, "machine": machine}


def test_torchruns_agents_are_hosts_even_on_one_machine() -> None:
    found = from_identities([told("0", "m"), told("1", "m"), told("0", "m"), told("1", "m")])
    assert found.hosts == ((0, 2), (1, 3))
    assert found.within(3) == (1, 3)
    assert found.across(3) == (2, 3)
    assert found.host_of(2) == 0


def test_without_agents_on_every_rank_machines_are_hosts() -> None:
    found = from_identities([told("0", "a"), told("", "b"), told("", "a")])
    assert found.hosts == ((0, 2), (1,))
    assert not found.even
    with pytest.raises(ValueError, match=r"as many ranks on each host, got 2 on host 0, 1 on host 1; start as many"):
        found.across(0)


@pytest.mark.parametrize("hosts", [((0, 0),), ((1,),), ((0,), ()), ((0, 2),)])
def test_every_rank_is_on_one_host(hosts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="each of the ranks 0, 1, … once"):
        Topology(hosts)


def test_identity_takes_the_agent_only_from_torchrun() -> None:
    assert identity({"GROUP_RANK": "3"})["agent"] == ""
    assert identity({"GROUP_RANK": "3", "LOCAL_WORLD_SIZE": "2"})["agent"] == "3"
    assert identity({})["machine"] == identity({"GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1"})["machine"]
