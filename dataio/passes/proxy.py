"""The loader that the loop gets back: the user's own, with a listener.

`LoaderProxy` answers everything as the loader it stands for (`len`, `dataset`, `batch_size`,
`isinstance`, operators), calls a listener when a batch is requested and delivered, and can switch
the engine that fetches its batches from one batch to the next, in the same order. Without a
listener it *is* the plain loader.

Python looks special methods up on the type, so a proxy of a list must be of a type that has those
of a list, and one of a generator of a type that has none of them. Each type of loader gets a type
of proxies of its own.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from accel.dataio.passes.passes import ActiveIterator, EpochIterator
from accel.profiler.interruptions import ours

if TYPE_CHECKING:
    from accel.dataio.dataset.fetch_watch import FetchWatch
    from accel.dataio.passes.kept_samples import KeptSamples
    from accel.dataio.passes.next_epoch import NextEpoch
    from accel.dataio.passes.prefetch import PrefetchAcrossEpochs


class LoaderListener(Protocol):
    """Callbacks of a loader proxy."""

    def epoch_begins(self) -> None:
        """The loop has asked for an iterator."""

    def batch_requested(self) -> None:
        """The loop asks for a batch: the code of the step before it has run to its end."""

    def batch_delivered(self, batch: Any) -> None:
        """A batch is about to be handed over."""

    def epoch_ended(self) -> None:
        """The loader has no more batches in this epoch."""

    def fetching_failed(self, error: Exception) -> None:
        """Worker processes failed; the proxy fetches plainly from here on, from the very batch that failed."""


class PassesUnderWay:
    """Know the passes that the loop has begun and holds, without keeping one alive."""

    def __init__(self) -> None:
        self._begun: list[weakref.ref[Any]] = []
        self.asked: weakref.ref[Any] | None = None
        """The pass that was asked last, by its name; set, and not by a call, for each batch."""

    def begin(self, one: Any) -> weakref.ref[Any]:
        """Note that a pass has begun; return what it is named by from then on."""
        reference = weakref.ref(one)
        self._begun = [each for each in self._begun if each() is not None]
        self._begun.append(reference)
        return reference

    def end(self, one: weakref.ref[Any]) -> None:
        self._begun = [each for each in self._begun if each is not one]

    @property
    def current(self) -> Any:
        """The pass that was asked last; None if there is none."""
        return None if self.asked is None else self.asked()

    @property
    def only(self) -> Any:
        """The pass that was asked last, if no other is under way, as in nearly every loop; else None."""
        begun = self._begun
        return begun[0]() if len(begun) == 1 and begun[0] is self.asked else None

    @property
    def newest(self) -> Any:
        """The pass that was begun last, of those that are held and have not ended; None if there is none."""
        return next((one for each in reversed(self._begun) if (one := each()) is not None), None)

    @property
    def oldest(self) -> Any:
        """The pass that was begun first, of those that are held and have not ended; None if there is none."""
        return next((one for each in self._begun if (one := each()) is not None), None)


class Fetching:
    """How the proxy gets its batches; strategies change it between two batches.

    Attributes:
        workers: what prefetches, or None to fetch as the plain loader does.
        next_epoch: what begins the next epoch early, by the loader's own workers, or None.
        samples: what keeps samples below all of these, or None.
        transforms: functions applied to each batch, in order.
        newest: the only pass whose batches `workers` may make.
    """

    def __init__(self) -> None:
        self.workers: PrefetchAcrossEpochs | None = None
        self.next_epoch: NextEpoch | None = None
        self.samples: KeptSamples | None = None
        self.newest = ActiveIterator()
        self.underway = PassesUnderWay()
        self.transforms: dict[str, Callable[[Any], Any]] = {}
        self.fetch_watch: FetchWatch | None = None


class LoaderProxy:
    """Stand for any iterable, and tell `listener`, if there is one, what the loop does with it."""

    __slots__ = ("__weakref__", "_accel_fetching", "_accel_listener", "_accel_loader", "_accel_pass")

    def __new__(cls, loader: Any, listener: LoaderListener | None = None) -> Any:
        return object.__new__(_proxy_type(type(loader)))

    def __init__(self, loader: Any, listener: LoaderListener | None = None) -> None:
        self._accel_loader, self._accel_listener = loader, listener
        self._accel_fetching = Fetching()
        self._accel_pass: Iterator[Any] | None = None

    # isinstance(proxy, DataLoader) holds wherever it held before.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._accel_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_accel_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_accel_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._accel_loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._accel_loader, name)

    # A copy, and what another process gets, is the plain loader.
    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self._accel_loader,)

    def __copy__(self) -> Any:
        return copy.copy(self._accel_loader)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._accel_loader, memo)

    def __repr__(self) -> str:
        return f"accel({self._accel_loader!r})"

    def __iter__(self) -> Iterator[Any]:
        if self._accel_listener is None:
            return iter(self._accel_loader)
        loader, fetching, listener = self._accel_loader, self._accel_fetching, self._accel_listener
        listener.epoch_begins()
        return _Listened(loader, fetching, listener)

    def _accel_next(self) -> Any:
        """Return the next batch of a loader that is an iterator itself: of a generator as one pass that is listened to.

        Others may begin anew when they are asked for an iterator, so that only the loop may do
        that.
        """
        if self._accel_listener is None or not isinstance(self._accel_loader, Generator):
            return next(self._accel_loader)
        if self._accel_pass is None:
            self._accel_pass = iter(self)
        return next(self._accel_pass)


def is_proxy(loader: Any) -> bool:
    """Return whether `loader` is a `LoaderProxy` (its `__class__` is that of the loader it stands for)."""
    return issubclass(type(loader), LoaderProxy)


def _plain(thing: Any) -> Any:
    return thing._accel_loader if is_proxy(thing) else thing


# Special methods that are the proxy's own, beside those that `LoaderProxy` defines.
_OWN = frozenset(
    f"__{name}__"
    for name in (
        *("init_subclass", "subclasshook", "class_getitem", "getattribute", "del", "annotate", "annotate_func"),
        *("reduce_ex", "getstate", "setstate", "getnewargs", "getnewargs_ex", "prepare", "release_buffer"),
    )
)
_types: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _proxy_type(kind: type) -> type:
    known = _types.get(kind)
    if known is not None and (made := known()) is not None:
        return made
    methods: dict[str, Any] = {}
    for name in set(dir(kind)) - _OWN - vars(LoaderProxy).keys():
        value = getattr(kind, name) if name.startswith("__") and name.endswith("__") else ""
        is_of_all = value is getattr(object, name, None) and name not in ("__eq__", "__ne__", "__hash__")
        if value is None or (callable(value) and not is_of_all):
            methods[name] = None if value is None else _forwarding(name)  # None as the hash of a list: there is none
    if "__next__" in methods:
        methods["__next__"] = LoaderProxy._accel_next
    # Errors name an object's type: they are the same as the plain loader's.
    names = {"__module__": __name__, "__qualname__": f"LoaderProxy[{kind.__qualname__}]", "__doc__": kind.__doc__}
    made = type(kind.__name__, (LoaderProxy,), {**methods, "__slots__": (), **names})
    _types[kind] = weakref.ref(made)
    return made


def _forwarding(name: str) -> Callable[..., Any]:
    """Return the special method `name` that asks the loader, as Python would."""
    ask = vars(operator).get(name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        loader, args = self._accel_loader, tuple(map(_plain, args))
        result = getattr(type(loader), name)(loader, *args, **kwargs) if ask is None else ask(loader, *args, **kwargs)
        return self if result is loader else result  # `+=` and `with` hand on the one that is listened to

    return method


class _Listened(EpochIterator):
    """A pass with transforms applied to its batches, and a listener called around them."""

    def __init__(self, loader: Any, fetching: Fetching, listener: LoaderListener) -> None:
        self._loader, self._fetching, self._listener = loader, fetching, listener
        self._pins = isinstance(loader, DataLoader) and loader.pin_memory and torch.cuda.is_available()
        super().__init__()
        self._underway, self._transforms = fetching.underway, fetching.transforms
        self._name = self._underway.begin(self)
        self._has_ended = False

    def __next__(self) -> Any:
        if self._has_ended:  # a loop that fetches ahead may ask again: that ends neither a step nor an epoch
            if isinstance(self._loader, Iterator):  # it may begin anew
                return next(self._loader)
            raise StopIteration
        position = self.position
        try:
            self._underway.asked = self._name
            self._listener.batch_requested()
            try:
                batch = super().__next__()
            except StopIteration:
                self._has_ended = True
                self._listener.epoch_ended()
                self._underway.end(self._name)
                raise
            for transform in self._transforms.values():
                batch = transform(batch)
            self._listener.batch_delivered(batch)
            return batch
        except ours():
            raise
        except BaseException:
            self.give_back(position)
            raise

    def __len__(self) -> int:
        """Return the batches of the whole pass, as torch's iterators do; those of other loaders may have no length."""
        counted: Any = self._loader._index_sampler if isinstance(self._loader, DataLoader) else self.rest
        return len(counted)

    def __bool__(self) -> bool:
        return not isinstance(self._loader, DataLoader) or len(self) > 0

    def begin_again(self) -> None:
        """Make the batches that follow anew, from where the loader's sampler is now."""
        self.detach()
        self.rest = iter(self._loader)

    def unheard(self) -> Any:
        """Return the next batch without a word to the listener: another thread than the loop's asks for it."""
        return super().__next__()

    # -- engines, which the controller may switch between any two batches ----------------------------------------------

    def _begin(self) -> None:
        """Go on with what was made ahead, or begin an epoch of the loader's own."""
        fetching = self._fetching
        fetching.newest.begin(self)
        if fetching.samples is not None:
            fetching.samples.begin_epoch()
        workers, following = fetching.workers, fetching.next_epoch
        if workers is not None:
            if workers.resume():
                self.continuous = workers
                return
            workers.drop()
        self.rest = iter(self._loader) if following is None else following.begin()

    def _batch(self) -> Any:
        """Return the next batch; one that the loader makes itself is watched."""
        fetching, workers = self._fetching, self.continuous
        if fetching.samples is not None:
            fetching.samples.before_batch(self.rest)
        if workers is not None or fetching.workers is not None:
            workers = self._chosen()
            if workers is not None:
                batch = workers.fetch()
                return pin_memory(batch) if self._pins else batch  # type: ignore[no-untyped-call]
        if fetching.next_epoch is not None:
            fetching.next_epoch.look_ahead(self.rest)
        # The first index list also draws the sampler's seed: that one is not the dataset's doing.
        if (watch := fetching.fetch_watch) is None or not self.position:
            return next(self.rest)
        return watch.around(partial(next, self.rest))

    def _chosen(self) -> PrefetchAcrossEpochs | None:
        """Return the workers that make the next batch: those that are wanted, once others are drained."""
        wanted = self._fetching.workers if self._fetching.newest.is_(self) else None
        current = self.continuous
        if current is not None:
            if current is not wanted:
                current.epoch.feeding = False
        elif wanted is not None and hasattr(self.rest, "_sampler_iter"):
            plain: Any = self.rest
            wanted.take(plain._sampler_iter, base_seed=plain._base_seed, first=self.position)
            self.continuous = wanted
        return self.continuous

    def _failed(self, error: Exception) -> bool:
        """Go on plainly from the very batch: a broken sample then raises the dataset's own error."""
        workers = self.continuous
        assert workers is not None
        if error is workers.epoch.sampler_error:
            return False
        self.detach()
        workers.close()
        self._fetching.workers = None
        self._listener.fetching_failed(error)
        return True

    def _rest_of(self, continuous: PrefetchAcrossEpochs) -> Any:
        plain: Any = self.rest
        if not hasattr(plain, "_sampler_iter"):
            plain = _quiet_iter(continuous.loader)
        plain._sampler_iter = continuous.left()
        return plain


def _quiet_iter(loader: DataLoader[Any]) -> Any:
    """Return a plain iterator of `loader` without drawing from its generator, or torch's own, and without index lists.

    Its sampler is not asked for a pass: to one that counts them, or starts afresh, that would be
    the end of this one.
    """
    mute = copy.copy(loader)
    mute.__dict__.update(generator=torch.Generator(), sampler=())  # the base seed is drawn here
    if loader.batch_sampler is not None:  # else samples are not collated
        mute.__dict__["batch_sampler"] = ()
    plain: Any = iter(mute)
    plain._index_sampler = loader._index_sampler  # its length
    return plain
