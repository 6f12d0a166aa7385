"""What a session's ranks have of each other: each one's result for rank 0, and who else stops after a failure."""

from __future__ import annotations

from functools import partial

from torch import nn

from accel.run.context import Run
from accel.run.ranks import Failure, Ranks
from accel.search.actions import Result
from accel.strategies.base import Strategy, asked, is_collective


def for_rank_0(own: Result, strategies: dict[str, Strategy], run: Run) -> Result:
    """Return what rank 0 needs of another rank's result: what may stop a strategy."""
    collective = [(name, strategy) for name, strategy in strategies.items() if is_collective(strategy)]
    refusals = {name: why for name, each in collective if (why := asked(partial(each.refusal, run)))}
    return Result(trips=own.trips, finding=own.finding, refusals=refusals, load=own.load)


def failure_of(error: Exception, ranks: Ranks | None, model: nn.Module) -> Failure:
    """Return an error of the session in words, and whether all ranks stop at this step.

    Args:
        error: the session's.
        ranks: None if they have not met.
        model: the user's.
    """
    if ranks is None:
        return Failure(f"{type(error).__name__}: {error}", everywhere=True)
    failure = ranks.failure(error)
    return failure._replace(everywhere=False) if ranks.distributed and _joins(model) else failure


def _joins(model: nn.Module) -> bool:
    """Return whether the model is within DDP's join(), where a rank may have ended its steps before the others."""
    config = getattr(model, "_join_config", None)
    return config is not None and bool(config.enable)
