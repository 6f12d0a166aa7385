"""What DGC really sends, by the counters of a host's interface."""

from __future__ import annotations

import pytest

from benchmarks.comm.lab import why_not
from benchmarks.comm_hooks import Setting, measure
from benchmarks.render import Row

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def measured(ranks: int, *methods: str, depth: int) -> dict[str, Row]:
    """Return the rows of one round on two hosts, checked against the formula and a hundredth of DDP."""
    found = {row["method"]: row for row in measure(Setting(2, ranks, "1gbit", methods), rounds=1, depth=depth)}
    for method in methods:
        # Fewer bytes would mean that something was not sent; acknowledgements count more beside so few.
        assert 1.0 <= found[method]["of_theory"] < 1.1
        assert found[method]["sent_mb"] < found["ddp"]["sent_mb"] / 100
        assert found[method]["replicas_equal"]
    return found


def test_a_host_sends_what_the_formula_says() -> None:
    measured(1, "dgc", depth=4)


def test_by_hosts_a_host_sends_a_quarter_of_what_its_two_ranks_send_to_all() -> None:
    found = measured(2, "dgc", "hierarchical dgc", depth=8)
    # But for the biases, of which a host sends half as much.
    assert 3.2 < found["dgc"]["sent_mb"] / found["hierarchical dgc"]["sent_mb"] < 4
