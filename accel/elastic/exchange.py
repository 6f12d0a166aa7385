"""What shortens the exchange of gradients just now, for whoever reckons with its time."""

from __future__ import annotations

from accel.profiler.bottleneck import Bottleneck
from accel.session.session import Session


def exchange_of(session: Session) -> str:
    """Return the names of the strategies that are on and treat the exchange of gradients; "" for the plain one."""
    if not (active := session.switchboard.active):  # at nearly every step
        return ""
    strategies = session.strategies
    return " and ".join(name for name in active if Bottleneck.COMMUNICATION in strategies[name].treats)
