"""Where a loop stands in its data, as a state that another run can go on from.

The state holds the random states under which the epoch's order was drawn and the number of batches handed over; not a
list of indices. Going on draws the same order again and passes over the lists that were served, without fetching them.
It does not depend on how batches are made: the number of workers may be another. With a `DistributedSampler` the number
of ranks and the batch size may be others too: what all ranks together have not seen is then dealt anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from accel.dataio import epochs

VERSION = 1


def begun(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what it takes to draw the epoch again that begins now; nothing has been drawn yet."""
    return {
        "random": epochs.capture(loader),
        "sampler_epoch": epochs.epoch_of(loader),
        "sampler": {name: sampler.state_dict() for name, sampler in _stateful(loader)},
        "dealt": _dealt(loader),
    }


def _stateful(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name)
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
            yield name, sampler


def _dealt(loader: DataLoader[Any]) -> dict[str, int] | None:
    """Return how a DistributedSampler deals the samples, None with any other sampler."""
    sampler = loader.sampler
    if type(sampler) is not DistributedSampler or loader.batch_size is None:
        return None
    return {"ranks": sampler.num_replicas, "batch_size": loader.batch_size, "length": len(sampler.dataset)}  # type: ignore[arg-type]


def check(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Raise ValueError if `state` is not one that this loader can go on from."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        got = state.get("version") if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"a loader's state must have version {VERSION}, got {got!r}; save it with state_dict()")
    length = len(loader.dataset)  # type: ignore[arg-type]
    if state["length"] != length:
        raise ValueError(
            f"a state continues the order of the dataset it was taken from, which had {state['length']} samples; this "
            f"one has {length}. Load the state with the same dataset, or begin the epoch anew"
        )
    old, now = len(state["begun"]["random"]), len(epochs.capture(loader))
    if old != now:
        raise ValueError(
            f"a state holds one random state for torch and one for each generator: {old}, but this loader has {now}; "
            "give the loader and its sampler generators as when the state was saved"
        )
    names = sorted(state["begun"]["sampler"])
    if names != sorted(name for name, _ in _stateful(loader)):
        raise ValueError(f"the state has states of {names or 'no samplers'}, unlike this loader; use the same samplers")


def put_back(loader: DataLoader[Any], begun: Mapping[str, Any]) -> None:
    """Put samplers and generators where they were when the epoch began.

    torch's global random state is left as it is: a training script puts it back itself.
    """
    epochs.restore(loader, [torch.get_rng_state(), *begun["random"][1:]])
    for name, sampler in _stateful(loader):
        sampler.load_state_dict(begun["sampler"][name])
    if begun["sampler_epoch"] is not None:
        epochs.set_epoch(loader, begun["sampler_epoch"])


def draw_again(loader: DataLoader[Any], state: Mapping[str, Any]) -> tuple[Iterator[Any], int, int]:
    """Draw the epoch of `state` again and pass over what was served.

    torch's global random state is left as it is. Those of the loader's own generators are left as the epoch's beginning
    left them.

    Returns:
        index lists that are left, the epoch's base seed, and the number of the first list.
    """
    saved, served = state["begun"], state["served"]
    now = torch.get_rng_state()
    put_back(loader, saved)
    torch.set_rng_state(saved["random"][0])
    try:
        stream, seed = epochs.begin(loader, seeded=state["base_seed"] if state["kept_seed"] else None)
        if saved["dealt"] is not None and saved["dealt"] != _dealt(loader):
            return _dealt_anew(loader, saved["dealt"], served), seed, served
        left = itertools.islice(stream, served, None)
        first = list(itertools.islice(left, 1))  # drawn here, under the saved random state
    finally:
        torch.set_rng_state(now)
    return itertools.chain(first, left), seed, served


def _dealt_anew(loader: DataLoader[Any], old: Mapping[str, int], served: int) -> Iterator[list[int]]:
    """Deal what the old ranks together had not taken to the ranks there are now, each sample once.

    Like DistributedSampler, ranks are evened out with repeats from the front, or with drop_last by leaving out.
    """
    sampler: Any = loader.sampler
    order = _order(sampler)
    left = order[served * old["ranks"] * old["batch_size"] :]
    ranks, batch = sampler.num_replicas, loader.batch_size
    assert batch is not None
    if sampler.drop_last:
        left = left[: len(left) // ranks * ranks]
    else:
        repeats = itertools.islice(itertools.cycle(order), -len(left) % ranks) if left else ()
        left += list(repeats)
    mine = left[sampler.rank :: ranks]
    for at in range(0, len(mine), batch):
        part = mine[at : at + batch]
        if len(part) == batch or not loader.drop_last:
            yield part


def _order(sampler: DistributedSampler[Any]) -> list[int]:
    """Return the order of all samples, before they are dealt to ranks."""
    length = len(sampler.dataset)  # type: ignore[arg-type]
    if not sampler.shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order
