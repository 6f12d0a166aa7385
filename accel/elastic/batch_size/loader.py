"""A `DataLoader` whose batch size may change between any two batches of an epoch, each sample still coming once.

The loader's own batch sampler is replaced by an `ElasticSampler`, in a copy of the loader; dataset, workers, collation
and pinning stay the user's. All ranks must deal samples in the same form.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.elastic_sampler import ElasticSampler, share_among
from accel.dataio.loader import ContinuousLoader
from accel.dataio.peek import PeekedEpoch
from accel.dataio.sampling.round_robin import world
from accel.elastic.worker_signals import outliving
from accel.errors import InvalidArgument
from accel.run.ranks import Ranks

if TYPE_CHECKING:
    from accel.settings import OptimizeSettings

_REMEDY = "make the loader with batch_sampler=accel.ElasticSampler(...), or leave max_batch_size out"
_DEALT_BY = "shuffle", "seed", "order", "drop_last", "tail"
"""Attributes by which a sampler deals, beside the batch size."""
_START_S = 30.0
"""By which ranks may come to `accel.optimize` at different times: twice as much is waited for."""


class EpochBatches(ElasticSampler):
    """An `ElasticSampler` whose length is that of the whole epoch, as loops that count their batches expect.

    Its state holds that of the generator which gives the loader's workers their seeds, as it was before the pass under
    way; and another run goes on with the seed and the kind of order that the state has, which were accel's choice.
    """

    _least = 2  # a changed batch may leave a single sample where the loader never does: batch norm needs two
    generator: torch.Generator | None = None
    """Of the loader; None if it is the user's on several ranks, where each may have another one."""
    sampler: EpochBatches
    """Itself: loops ask torch's `BatchSampler` for that, to tell it the epoch."""
    _before_pass: Tensor | None = None
    _taken_then: int | None = None
    """Steps taken when the pass under way began. While no more are, an iterator that is asked for begins the same pass:
    a loader with workers asks twice, and draws in between."""

    @property
    def batch_size(self) -> int:
        return self.batch_sizes[self.rank]

    def __len__(self) -> int:
        """Return the steps of this epoch: those the loop has taken since it began or was resumed, and those to come."""
        place = self.ledger.place
        return place.taken - place.taken_before + self.ledger.steps_left

    def __iter__(self) -> Iterator[list[int]]:
        """Begin a pass; the loader then draws the workers' seed."""
        if self.generator is not None and self._taken_then != self.ledger.place.taken:
            self._before_pass, self._taken_then = self.generator.get_state(), self.ledger.place.taken
        return super().__iter__()

    def peek_epoch(self, epoch: int) -> PeekedEpoch | None:
        """Return the pass over `epoch` that follows; the workers' seed is drawn between its two questions."""
        peeked, generator = super().peek_epoch(epoch), self.generator
        if peeked is None or generator is None:
            return peeked
        before = generator.get_state()

        def holds() -> bool:
            nonlocal before
            before = generator.get_state()
            return peeked.holds()

        def begin() -> None:
            self._before_pass, self._taken_then = before, self.ledger.place.taken
            peeked.begin()

        return peeked._replace(holds=holds, begin=begin)

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to go on from here, equal on all ranks."""
        state = super().state_dict()
        if self.generator is not None:
            before = self._before_pass if self.position or self.ledger.dealt_ahead else None  # where it has begun
            state["generator"] = self.generator.get_state() if before is None else before
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, in its order, on this sampler's number of ranks and with its batch sizes.

        Raises:
            ValueError: if it is of another dataset length, or of a loader that shuffles while this does not.
        """
        seed, order = state.get("seed"), state.get("order")
        if type(seed) is int and 0 <= seed < 1 << 63 and order in ("feistel", "torch"):
            self.seed, self.order = seed, order
        super().load_state_dict(state)  # which refuses others
        if self.generator is not None and "generator" in state:
            self.generator.set_state(state["generator"])


def elastic_loader(loader: Any) -> DataLoader[Any]:
    """Return a loader as `loader`, with an `ElasticSampler` in place of its batch sampler.

    Its workers end with this process, and not by a signal to all of its group. A loader that has such a sampler already
    keeps it, and comes back as it is if it has no workers, or is a `ContinuousLoader`, which puts others in their place
    and from now on leaves the counting to its caller. The order is another shuffle of the same kind: under the seed of
    the loader's generator, or of torch's.

    Args:
        loader: a map-style `DataLoader` in order of the dataset, shuffled, or with a `DistributedSampler`; or with
            torch's own `BatchSampler` of such samples.

    Raises:
        InvalidArgument: if its batches can't be made in another size; the message says why.

    Example:
        >>> loader = elastic_loader(DataLoader(range(10), batch_size=4))
        >>> [batch.tolist() for batch in loader.batch_sampler.consumed(loader)]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    if reason := _fixed(loader):
        raise InvalidArgument(
            f"max_batch_size and checkpoint need a loader whose batches accel can deal out, but {reason}; {_REMEDY}"
        )
    if isinstance(loader.batch_sampler, ElasticSampler):
        if isinstance(loader, ContinuousLoader):
            loader.leave_counting()
            return loader
        is_taken_over = loader.num_workers == 0 or plain_loader(loader) is not loader
        return loader if is_taken_over else _copied(loader)
    own: Any = loader.batch_sampler  # a loader that was given one knows neither size nor drop_last itself
    batches = EpochBatches(batch_size=own.batch_size, drop_last=own.drop_last, **_order(own, loader.generator))
    # torch refuses to have these set on a loader once it is made. A generator of its own gives the workers their seeds:
    # a training that is resumed in the midst of an epoch asks for an iterator once more than one that was not.
    generator = loader.generator or torch.Generator().manual_seed(batches.seed)
    batches.sampler = batches
    batches.generator = generator if loader.generator is None or batches.num_replicas == 1 else None
    return _copied(loader, batch_sampler=batches, sampler=batches, generator=generator)


def _copied(loader: DataLoader[Any], **others: Any) -> DataLoader[Any]:
    elastic = copy.copy(loader)
    vars(elastic).update(others, _iterator=None, plain_loader=loader)
    if loader.num_workers:
        elastic.worker_init_fn = outliving(loader.worker_init_fn)
    return elastic


def plain_loader(loader: Any) -> Any:
    """Return the loader that an elastic one was made from, any other as it is."""
    return getattr(loader, "plain_loader", loader) if isinstance(loader, DataLoader) else loader


def _fixed(loader: Any) -> str:
    """Return '' if the loader's batches can be made in another size, else why not."""
    if not isinstance(loader, DataLoader):
        return f"this is a {type(loader).__name__}, not a torch.utils.data.DataLoader"
    if getattr(loader, "in_order", True) is False:
        return "its batches come in any order (in_order=False): which samples the loop has had can't be counted"
    if isinstance(loader.batch_sampler, ElasticSampler):
        return ""
    if loader._dataset_kind != 0:
        return "its dataset is iterable: it can't be asked for other samples"
    if loader.batch_sampler is None:
        return "it makes no batches (batch_size=None)"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"it has a batch sampler of its own, a {type(loader.batch_sampler).__name__}"
    if type(loader) is not DataLoader:
        return f"this is a {type(loader).__name__}, a subclass of DataLoader that can't be made again"
    return _own_order(loader.batch_sampler.sampler)


def _own_order(sampler: Any) -> str:
    """Return '' if the order of a sampler is one that an `ElasticSampler` has, else why it isn't."""
    (replicas, rank), name = world(), type(sampler).__name__
    if type(sampler) is DistributedSampler:
        own, here = f"rank {sampler.rank} of {sampler.num_replicas}", f"{rank} of {replicas}"
        return "" if own == f"rank {here}" else f"its DistributedSampler is {own}, this process {here}"
    if replicas > 1:
        return f"with several ranks its samples must be shared out by a DistributedSampler, not a {name}"
    if type(sampler) is RandomSampler:
        others = sampler.replacement or sampler.num_samples != len(sampler.data_source)
        return "its RandomSampler draws with replacement, or another number than there are samples" if others else ""
    return "" if type(sampler) is SequentialSampler else f"its order is that of a {name}"


def _order(own: BatchSampler, generator: torch.Generator | None) -> dict[str, Any]:
    """Return which samples there are, perhaps a part of the loader's dataset, in which order, and how they end.

    Each comes once, and no rank is left without any. Where short batches are left out, steps are those of the loader:
    the last one may be filled by repeats.
    """
    sampler: Any = own.sampler
    if isinstance(sampler, DistributedSampler):
        tail = "drop" if sampler.drop_last else "pad" if own.drop_last else "fill"
        order = {"shuffle": sampler.shuffle, "seed": sampler.seed, "order": "torch", "tail": tail}
        return {"dataset_or_length": sampler.dataset, **order}
    generator = getattr(sampler, "generator", None) or generator
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    order = {"shuffle": isinstance(sampler, RandomSampler), "seed": seed % (1 << 63), "tail": "fill"}
    return {"dataset_or_length": sampler.data_source, **order}


def deal_alike(sampler: ElasticSampler, settings: OptimizeSettings, *, is_new: bool) -> None:
    """Have all ranks deal samples in the same form, also one that has just joined: else some come twice.

    Raises:
        InvalidArgument: on all ranks, for the first setting by which two of them differ.
    """
    sizes, rule = sampler.batch_sizes, settings.scaling_rule
    mine = {name: getattr(sampler, name) for name in _DEALT_BY} | {
        "samples": sampler.length,
        "batch_size": sizes[sampler.rank] if len(set(sizes)) == 1 else sizes,
        "max_batch_size": settings.max_batch_size,
        "scaling_rule": getattr(rule, "__qualname__", rule and type(rule).__qualname__),
        "checkpoint": settings.checkpoint is not None,
    }

    def answer(brought: list[Any]) -> tuple[str, dict[str, Any]]:
        for (name, first), (rank, each) in itertools.product(brought[0].items(), enumerate(brought)):
            if each is not None and each[name] != first:
                return f"got {name} {first} on rank 0 and {each[name]} on rank {rank}", brought[0]
        return "", brought[0]

    ranks = Ranks()
    ranks.join(since=time.time())
    problem, first = ranks.decide(None if is_new else mine, answer, "did not come to accel.optimize", _START_S)
    if problem:
        raise InvalidArgument(
            f"loader and settings must be the same on all ranks, {problem}; if batches are to have several sizes, give "
            "every rank batch_sampler=accel.ElasticSampler(..., batch_size=[one for each rank])"
        )
    if is_new:
        vars(sampler).update({name: first[name] for name in _DEALT_BY})
        share_among(sampler, sampler.num_replicas, sampler.rank, first["batch_size"])
