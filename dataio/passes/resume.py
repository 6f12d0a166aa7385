"""Where a loop stands in its data, as a state that another run can go on from.

The state holds the random states under which the epoch's order was drawn and the number of batches
handed over; not a list of indices. Going on draws the same order again and passes over the lists
that were served, without fetching them. It does not depend on how batches are made: the number of
workers may be another, and so may the batch size, unless a batch sampler of its own kind makes the
batches. With a `DistributedSampler` the number of ranks may be another too, at each resumption: its
order doesn't depend on it, so that the place in it, up to which all ranks together have taken
samples, is enough to deal the rest anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from accel.dataio.passes import epochs
from accel.profiler.errors import InvalidArgument

VERSION = 2


def begun(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what it takes to draw the epoch again that begins now; nothing has been drawn yet."""
    return {
        "random": epochs.capture(loader),
        "sampler_epoch": epochs.epoch_of(loader),
        # In which its next pass begins; the state of the pass before may be what a sampler has at hand.
        "sampler": {name: getattr(each, "begin_state", each.state_dict)() for name, each in _stateful(loader)},
        "kind": _kind(loader),
        "dealt": _dealt(loader, start=0, served=0),
    }


def begun_again(loader: DataLoader[Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `begun` for the run that goes on from `state`: with its own ranks, from where the old ones had come."""
    saved: dict[str, Any] = dict(state["begun"])
    old, served = saved["dealt"], state["served"]
    if old is None:
        return saved
    start = old["start"] + (served - old["served"]) * old["ranks"] * old["batch_size"]
    return saved | {"dealt": _dealt(loader, start, served)}


def _stateful(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name)
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
            yield name, sampler


def _dealt(loader: DataLoader[Any], start: int, served: int) -> dict[str, int] | None:
    """Return how the samples become the batches of each rank, None with a batch sampler that has its own way.

    A DistributedSampler deals the order of all ranks, another sampler gives this rank's; the
    batches `served` before it don't count from place `start` on.
    """
    size = _batch_size(loader)
    if size is None:
        return None
    sampler = epochs.ordering(loader)
    ranks = sampler.num_replicas if type(sampler) is DistributedSampler else 1
    return {"ranks": ranks, "batch_size": size, "start": start, "served": served}


def _batch_size(loader: DataLoader[Any]) -> int | None:
    """Return how many samples of its order a loader takes at once; None if a batch sampler decides that."""
    if loader.batch_sampler is None:
        return 1
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else None


def _kind(loader: DataLoader[Any]) -> str:
    return type(epochs.ordering(loader)).__name__


def check(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if `state` is not one that this loader can go on from."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        got = state.get("version") if isinstance(state, Mapping) else type(state).__name__
        raise InvalidArgument(f"a loader's state must have version {VERSION}, got {got!r}; save it with state_dict()")
    length = len(loader.dataset)  # type: ignore[arg-type]
    if state["length"] != length:
        raise InvalidArgument(
            f"a state continues the order of the dataset it was taken from, which had {state['length']} samples; this "
            f"one has {length}. Load the state with the same dataset, or restart the epoch"
        )
    kind, own = state["begun"]["kind"], _kind(loader)
    if kind != own and not state["finished"]:
        raise InvalidArgument(
            f"in the middle of an epoch a state goes on only with the sampler it was taken with, a {kind}; this loader "
            f"has a {own}. Use a {kind}, or restart the epoch. Where ranks come and go, use a DistributedSampler in "
            "a single process too, with num_replicas=1 and rank=0"
        )
    old, now = len(state["begun"]["random"]), len(epochs.capture(loader))
    if old != now:
        raise InvalidArgument(
            f"a state holds one random state for torch and one for each generator: {old}, but this loader has {now}; "
            "give the loader and its sampler generators as when the state was saved"
        )
    names = sorted(state["begun"]["sampler"])
    if names != sorted(name for name, _ in _stateful(loader)):
        raise InvalidArgument(
            f"the state has states of {names or 'no samplers'}, unlike this loader; use the same samplers"
        )


def put_back(loader: DataLoader[Any], begun: Mapping[str, Any]) -> None:
    """Put samplers and generators where they were when the epoch began.

    torch's global random state is left as it is: a training script puts it back itself.
    """
    epochs.restore_own(loader, begun["random"][1:])
    for name, sampler in _stateful(loader):
        sampler.load_state_dict(begun["sampler"][name])
    if begun["sampler_epoch"] is not None:
        epochs.set_epoch(loader, begun["sampler_epoch"])


def draw_again(
    loader: DataLoader[Any], begun: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[Iterator[Any], int]:
    """Draw the epoch of `state` again, pass over what was served, and return the index lists left, and the base seed.

    torch's global random state is left as it is. Those of the loader's own generators are left as
    the epoch's beginning left them.
    """
    put_back(loader, begun)
    seeded, dealt = state["base_seed"] if state["kept_seed"] else None, begun["dealt"]
    now = torch.get_rng_state()
    torch.set_rng_state(begun["random"][0])
    try:
        stream, seed = epochs.begin(loader, seeded=seeded)
        sampler = epochs.ordering(loader)
        if type(sampler) is DistributedSampler and dealt is not None:
            return _batches(loader, _dealt_from(sampler, dealt["start"])), seed
        if dealt is not None:
            stream = _batches(loader, itertools.islice(sampler, dealt["start"], None))
        else:
            stream = itertools.islice(stream, state["served"], None)
        first = list(itertools.islice(stream, 1))  # drawn here, under the saved random state
    finally:
        torch.set_rng_state(now)
    return itertools.chain(first, stream), seed


def _batches(loader: DataLoader[Any], samples: Iterator[int]) -> Iterator[Any]:
    """Return what the loader's own batch sampler makes of these samples."""
    own: Any = loader.batch_sampler
    return samples if own is None else iter(BatchSampler(samples, own.batch_size, own.drop_last))


def _dealt_from(sampler: DistributedSampler[Any], start: int) -> Iterator[int]:
    """Deal the order from place `start` on to the ranks, each sample once.

    Like DistributedSampler, ranks are evened out with repeats from the front, or with drop_last by
    leaving out. So they get what it would have gone on with if they are as many as before.
    """
    of_all = DistributedSampler[int](sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed)
    of_all.set_epoch(sampler.epoch)
    order = list(of_all)
    left, ranks = order[start:], sampler.num_replicas
    if sampler.drop_last:
        left = left[: len(left) // ranks * ranks]
    elif left:
        left += itertools.islice(itertools.cycle(order), -len(left) % ranks)
    return iter(left[sampler.rank :: ranks])
