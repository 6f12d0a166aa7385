"""A `DataLoader` whose batches are made in the fastest way there is, without a pause between epochs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.dataio.elastic_sampler import ElasticSampler
from accel.dataio.passes import epochs, resume
from accel.dataio.passes.engines import MODES, Mode, Options
from accel.dataio.passes.loader_core import CoreIterator, LoaderCore, LoaderPass
from accel.dataio.passes.movable import not_movable
from accel.profiler import renamed
from accel.profiler.errors import InvalidArgument, InvalidType, check_numbers

# Attributes of a `DataLoader` that may be set, and that batches depend on.
_FETCHES_BY = frozenset(
    {
        *("collate_fn", "generator", "in_order", "multiprocessing_context", "num_workers", "pin_memory"),
        *("pin_memory_device", "prefetch_factor", "timeout", "worker_init_fn"),
    }
)


class ContinuousLoader(DataLoader[Any]):
    """Wrap a `DataLoader`: the same batches in the same order, made ahead across the end of an epoch.

    Args:
        loader: the loader to wrap; its dataset, samplers, collate function, worker_init_fn, generator, pinning,
            time-out and multiprocessing context are used. One over an `IterableDataset` is passed through as it is.
        mode: how batches are made. "inline" in the loop's thread; "threads" (the dataset must bear it); "processes" by
            the loader's own context, or "fork", "forkserver", "spawn"; "auto" (default) tries them on the running loop
            and chooses, see `explain`; with a worker_init_fn it tries processes only.
        num_workers: threads or processes; default the loader's, or else the cores this process may use. With "auto"
            it is measured, and this is the most that is tried; default the cores, and more where fetching waits for
            something other than a core.
        prefetch_factor: batches each worker may be ahead; default the loader's, or 2, and with `mode="auto"` more, up
            to 64 in all, where that shortens the loop's wait.
        thread_safe: whether several threads may read the dataset at once; only then does "auto" try them, unless
            fetching draws random numbers. Default: its attribute `thread_safe`, or else whether it holds nothing but
            data and isn't changed by reading, see `accel.dataio.dataset.thread_safety`.
        device: where to copy batches to, one ahead, on a stream of its own; default: nowhere.

    Raises:
        InvalidType: if `loader` is not a `DataLoader`.
        InvalidArgument: if an argument is out of range, or a mode is not to be had for this loader.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = ContinuousLoader(DataLoader(range(6), batch_size=2), mode="inline")
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4, 5]]
    """

    @renamed.arguments(workers="num_workers", prefetch="prefetch_factor")
    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        mode: Mode = "auto",
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        thread_safe: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise InvalidType(f"a ContinuousLoader wraps a torch.utils.data.DataLoader, got {type(loader).__name__}")
        if isinstance(loader, ContinuousLoader):
            raise InvalidArgument("the loader is a ContinuousLoader already; wrap the DataLoader inside it")
        if mode not in MODES:
            raise InvalidArgument(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        check_numbers(num_workers=num_workers, prefetch_factor=prefetch_factor)
        for name, value in (("num_workers", num_workers), ("prefetch_factor", prefetch_factor)):
            if value is not None and value < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {value}")
        reason = not_movable(loader)
        if reason and mode not in ("auto", "inline"):
            raise InvalidArgument(f"mode={mode!r} needs a map-style loader, but {reason}; use mode='auto'")
        # A DataLoader with the very objects of the wrapped one: attributes, len() and isinstance() are its own.
        self.__dict__.update(loader.__dict__)
        self.__dict__["_core"] = LoaderCore(loader, Options(mode, num_workers, prefetch_factor, thread_safe, device))

    _core: LoaderCore

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        setattr(self._core.loader, name, value)
        if name in _FETCHES_BY:
            self._core.close()  # what makes batches knows the old value

    def __iter__(self) -> Any:
        core, sampler = self._core, self.batch_sampler
        if core.passed_through:
            return CoreIterator(core)
        if not isinstance(sampler, ElasticSampler):
            return LoaderPass(core, self)
        if core.counts is None:
            core.counts = not sampler.ledger.is_counting  # unless the loop iterates sampler.consumed(loader) itself
        running = LoaderPass(core, self)
        return sampler.consumed(running) if core.counts else running

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and of the dataset, where they have a `set_epoch`.

        Args:
            epoch: number of the epoch that the next pass is.
        """
        parts = (self.batch_sampler, self.sampler, epochs.ordering(self), self.dataset)
        for each in {id(part): part for part in parts}.values():
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)  # type: ignore[union-attr]

    def leave_counting(self) -> None:
        """Count no batches of an `ElasticSampler` any more: the caller does, by `advance` for each one it gets."""
        self._core.counts = False

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands: numbers and random states, fit for `torch.load(weights_only=True)`.

        Taken in the loop's body it counts the batch in hand as used: save after the optimizer's step.
        """
        return self._core.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next pass begins after the last batch handed over.

        The number of workers and the mode may be others, and so may the batch size, unless a `batch_sampler` of its
        own kind makes the batches. With a DistributedSampler the number of ranks may be another too; what is left of
        the epoch is then dealt anew, each sample once. The samplers must be made with the same seed.

        Raises:
            InvalidArgument: if it is not a state of this class, or of another dataset length or kind of sampler.
        """
        if not self._core.passed_through:
            resume.check(self._core.loader, state)
        self._core.load(state)

    @property
    def worker_processes(self) -> int:
        """How many worker processes make batches now."""
        return len(self._core.worker_processes())

    @property
    def _workers(self) -> list[Any]:
        """Between two passes the profiler asks the loader, in a pass the pass."""
        return self._core.worker_processes()

    @property
    def setting(self) -> str:
        """How batches are made now: `inline`, `threads(2)`, `fork(4)`."""
        return str(self._core.setting)

    def explain(self) -> str:
        """Return how batches are made and why, with what was tried, as text."""
        core = self._core
        if core.passed_through:
            return f"left as it is: {core.passed_through}"
        return core.tuner.explain() if core.tuner is not None else f"{core.setting}: {core.reason}"

    def close(self) -> None:
        """End threads and processes; the next pass starts them anew."""
        self._core.close()

    def __enter__(self) -> ContinuousLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ContinuousLoader, **self._core.options._asdict()), (self._core.loader,)
