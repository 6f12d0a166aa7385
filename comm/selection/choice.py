"""Which scheme gradients should go by: the steps measured for each, and how exact each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from accel.comm.catalogue import CATALOGUE, Scheme

WORTH = 0.02
"""Least gain, as a share of the step, for which anything is done at all."""
_ALIKE = 0.03
"""Of steps within this of each other the more exact scheme comes first."""

Option = Scheme | None
"""How gradients go; None is DDP's own all-reduce."""


def named(option: Option) -> str:
    """Return an option in words."""
    return "plain" if option is None else str(option)


def fidelity(option: Option) -> int:
    """Return the place of an option in the order of the catalogue: the less, the more exact."""
    return -1 if option is None else list(CATALOGUE).index(option.compressor)


def preferred(tried: Mapping[Option, float]) -> Option:
    """Return the option with the shortest step, or one about as short and more exact."""
    alike = [option for option, step_s in tried.items() if step_s <= min(tried.values()) * (1 + _ALIKE)]
    return min(alike, key=lambda option: (fidelity(option), tried[option]))


@dataclass
class Choice:
    """The seconds of a step by each option."""

    screened: dict[Option, float]
    """In the few steps that each had at first, on the slowest rank; DDP's own all-reduce is one of them."""
    measured: dict[Option, float] = field(default_factory=dict)
    """Of those that were tried in turns with the best."""

    def step_s(self, option: Option) -> float:
        """Return the step of an option, as far as it is known."""
        return self.measured.get(option, self.screened[option])

    @property
    def candidates(self) -> list[Scheme]:
        """Return the schemes that beat DDP's own all-reduce at first, best first."""
        left = {
            option: step_s for option, step_s in self.screened.items() if step_s < self.screened[None] * (1 - WORTH)
        }
        ranked: list[Scheme] = []
        while left:
            best = preferred(left)
            assert best is not None
            ranked.append(best)
            del left[best]
        return ranked

    @property
    def best_screened(self) -> str:
        """Return in words which scheme comes nearest to DDP's own step, or beats it."""
        schemes = {option: step_s for option, step_s in self.screened.items() if option is not None}
        if not schemes:
            return "no scheme fits these gradients"
        best = min(schemes, key=schemes.__getitem__)
        return f"the best, {best}, took {schemes[best] * 1e3:.1f} ms"

    def table(self, chosen: Option) -> str:
        """Return the options, one a line: the step at first, and in turns with the best."""
        width = max(len(named(option)) for option in self.screened)
        lines = [f"{'scheme':{width}}    at first    in turns"]
        for option, step_s in sorted(self.screened.items(), key=lambda item: item[1]):
            in_turns = f"{self.measured[option] * 1e3:8.1f} ms" if option in self.measured else " " * 11
            mark = "  <- chosen" if option == chosen else ""
            lines.append(f"{named(option):{width}} {step_s * 1e3:8.1f} ms {in_turns}{mark}".rstrip())
        return "\n".join(lines)
