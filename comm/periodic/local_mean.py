"""Means for local SGD: of gradients over the ranks of a host, and of weights over all ranks.

Both are pipelines as a hook has them. Weights go by hosts first where that saves bytes: a host with G ranks of N hosts
sends 2 (N − 1)/N of them over its uplink, in place of 2 (NG − 1)/(NG).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel.comm.catalogue import Scheme
from accel.comm.compressor import Exact
from accel.comm.engine.pipeline import BucketJob
from accel.comm.engine.reduction import Arrangement, arranged
from accel.comm.hooks import CommState
from accel.comm.layout import Layout

BUCKET_BYTES = 25 << 20  # DDP's own
_UNDER_WAY = 4  # buckets in the stages at once; each is a copy of its tensors

Named = Sequence[tuple[str, Tensor]]


class HostMean(CommState):
    """State of a hook that averages gradients over the ranks of each host, as they are."""

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        super().__init__(model, Exact(), process_group=process_group, timeout=timeout)

    def arrangement(self, scheme: Scheme) -> Arrangement:
        """Return this host's ranks alone."""
        within = self.topology.within(self.binding.rank)
        return Arrangement(False, within, within, len(within))


class WeightMean(CommState):
    """Replaces tensors by their means over all ranks, the same bits on each."""

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        super().__init__(model, Exact(), process_group=process_group, timeout=timeout)
        self.objects = self.binding.objects(timeout)

    def close(self) -> None:
        """End threads and groups."""
        if self.is_open:
            self.objects.close()
        super().close()

    def arrangement(self, scheme: Scheme) -> Arrangement:
        """Return all ranks, by hosts where that pays."""
        return arranged(self.topology, self.binding.rank, self.topology.by_hosts_pays)

    @torch.no_grad()
    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks the first one's values of a few small tensors."""
        for own, first in zip(tensors, self.objects.first([tensor.detach().cpu() for tensor in tensors]), strict=True):
            own.copy_(first)

    @torch.no_grad()
    def average(self, named: Named, step: int) -> None:
        """Replace tensors by their means, summed in float32 at least.

        Args:
            named: floating-point tensors of one device, by names; the same on every rank.
            step: for messages.
        """
        route = self.route()
        under_way: deque[tuple[_Bucket, BucketJob]] = deque()
        for bucket in _buckets(named):
            whole = torch.cat([tensor.reshape(-1) for tensor in bucket.tensors])
            buffer = whole.to(torch.promote_types(whole.dtype, torch.float32))
            job = BucketJob(step, bucket.layout, buffer, self.memory.slot(bucket.layout))
            route.submit(job)
            under_way.append((bucket, job))
            if len(under_way) == _UNDER_WAY:
                _finish(*under_way.popleft())
        while under_way:
            _finish(*under_way.popleft())
        route.wait()


class _Bucket(NamedTuple):
    """Tensors that go together, and where each stands."""

    layout: Layout
    tensors: list[Tensor]


def _buckets(named: Named) -> Iterator[_Bucket]:
    """Yield tensors of one dtype together, BUCKET_BYTES of them or one that is larger."""
    groups: list[list[tuple[str, Tensor]]] = []
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in named):
        filled = BUCKET_BYTES
        for name, tensor in named:
            if tensor.dtype is dtype:
                if filled + tensor.nbytes > BUCKET_BYTES:
                    groups.append([])
                    filled = 0
                groups[-1].append((name, tensor))
                filled += tensor.nbytes
    for index, group in enumerate(groups):
        names, tensors = tuple(name for name, _ in group), [tensor for _, tensor in group]
        kind = torch.promote_types(tensors[0].dtype, torch.float32)
        layout = Layout(index, names, tuple(tensor.shape for tensor in tensors), kind, index == len(groups) - 1)
        yield _Bucket(layout, tensors)


def _finish(bucket: _Bucket, job: BucketJob) -> None:
    """Wait for a bucket and give its means to the tensors."""
    mean = job.future.wait()
    parts = torch.split(mean, [tensor.numel() for tensor in bucket.tensors])
    for tensor, part in zip(bucket.tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def fingerprint(named: Named) -> int:
    """Return a number that is the same where names, shapes and dtypes are."""
    return zlib.crc32(repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]).encode())
