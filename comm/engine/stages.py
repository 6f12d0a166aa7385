"""The stages that a bucket passes through, each with a channel of its own.

flat:     divide, first stage of the scheme │ … │ last stage of the scheme, write back
by hosts: divide, sum a slice within the host │ the scheme's stages on the slice, across hosts │ gather, write back
"""

from __future__ import annotations

from collections.abc import Callable

from accel.comm.compressor import Compressor
from accel.comm.engine.pipeline import PipelineStage
from accel.comm.engine.reduction import BucketJob, Reduction
from accel.comm.ranks.channel import Channel


def pipeline_stages(
    compressor: Compressor,
    reduction: Reduction,
    hierarchical: bool,
    within: tuple[int, ...],
    across: tuple[int, ...],
    channel: Callable[[str, tuple[int, ...]], Channel],
) -> list[PipelineStage]:
    """Return the stages of a scheme.

    Args:
        compressor: what is sent between the ranks `across`.
        reduction: what happens around it.
        hierarchical: sum over the ranks `within` a host first, and gather there in the end.
        within: ranks of this host.
        across: all ranks, or by hosts those with the same slice.
        channel: makes a channel, from a name and its ranks.
    """
    stages: list[PipelineStage] = []
    inner = compressor.stages()
    if hierarchical:
        stages.append(PipelineStage("sum within the host", reduction.sum_within, channel("sum", within)))
    for number, stage in enumerate(inner):

        def run(job: BucketJob, channel: Channel, number: int = number) -> None:
            if number == 0 and not hierarchical:
                reduction.divide(job)
            assert job.piece is not None
            inner[number].run(job.piece, channel)
            if number == len(inner) - 1 and not hierarchical:
                reduction.write_back(job)

        stages.append(PipelineStage(stage.name, run, channel(f"{number}", across)))
    if hierarchical:
        stages.append(PipelineStage("gather within the host", reduction.gather_within, channel("gather", within)))
    return stages
