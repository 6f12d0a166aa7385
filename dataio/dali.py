"""An `ImageDataset` read by NVIDIA DALI: on a GPU its decoder and kernels, without one its CPU operators.

DALI decodes and resizes, nothing else. Order, sharding, crops and epochs are those of torch and of the data set, and
computed here: DALI's own readers cannot resume without a checkpoint of their state, and their shards and last batches
differ from `DistributedSampler`'s. So the loader can be put in place of

    DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, …), collate_fn=collate_images)

and the same samples come in the same batches with the same crops.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from accel.dataio.engine.transfer import pin
from accel.dataio.image.libraries import dali
from accel.dataio.image.pixels import Interpolation
from accel.dataio.image_geometry import Pair, Placement
from accel.dataio.images import ImageDataset
from accel.dataio.sampling.round_robin import world
from accel.profiler import renamed
from accel.profiler.errors import InvalidArgument

Batch = tuple[Sequence[bytes], Sequence[Placement]]
LastBatch = Literal["partial", "drop", "fill"]
Batches = Generator[tuple[Tensor, Tensor], None, None]


class DaliLoader:
    """Iterate (images, labels) batches of an image data set, decoded by DALI.

    Args:
        dataset: what to read; its transform, seed, `interpolation` and `exif` are used, its `threads` and
            `reducing_gap` are not.
        batch_size: images of one rank's batch, at least 1.
        shuffle: another order in each epoch, the one of `DistributedSampler`; default False.
        seed: of the order, the same on every rank, default 0.
        num_replicas: number of ranks, default that of the process group, else 1.
        rank: this one, default that of the process group, else 0.
        last_batch: what becomes of samples that don't fill a batch, see below.
        device: to decode on and to leave the batches on; default the current CUDA device, else the CPU.
        threads: of DALI, default 2.
        prefetch_factor: batches under way, at least 1, default 2.

    | last_batch | ranks with unequal shares | the last batch of a rank |
    |---|---|---|
    | `"partial"` | the first samples of the epoch come twice (`drop_last=False` of the sampler) | is smaller |
    | `"drop"` | samples are left out (`drop_last=True` of the sampler) | is left out |
    | `"fill"` | as `"partial"` | is filled from the beginning of the rank's epoch |

    Images are (B, 3, H, W) uint8 in channels_last on `device`, labels (B,) int64 there too.

    Raises:
        InvalidArgument: if an argument is out of range; while iterating, if an image cannot be decoded.
        ImportError: if DALI is not installed.

    Example:
        >>> loader = DaliLoader(ImageFolder("imagenet/train", RandomResizedCrop(224)), 256, shuffle=True)
        >>> for epoch in range(90):
        ...     loader.set_epoch(epoch)
        ...     for images, labels in loader:
        ...         loss = criterion(model(normalize(images)), labels)
    """

    @renamed.arguments(prefetch="prefetch_factor")
    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        last_batch: LastBatch = "partial",
        device: torch.device | str | None = None,
        threads: int = 2,
        prefetch_factor: int = 2,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("threads", threads), ("prefetch_factor", prefetch_factor)):
            if value < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {value}")
        if last_batch not in get_args(LastBatch):
            raise InvalidArgument(f"last_batch must be one of {get_args(LastBatch)}, got {last_batch!r}")
        self.dataset, self.batch_size, self.last_batch = dataset, batch_size, last_batch
        self.num_replicas, self.rank = world(num_replicas, rank)
        self.sampler: DistributedSampler[int] = DistributedSampler(
            dataset, self.num_replicas, self.rank, shuffle, seed, drop_last=last_batch == "drop"
        )
        self.device = _device(device)
        self._threads, self._prefetch = threads, prefetch_factor
        self._graph: Graph | None = None
        self._running: Batches | None = None
        self._start = self._given = 0

    @property
    def epoch(self) -> int:
        """The epoch of the order."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, of order and crops; setting the one that a loaded state is in leaves its place alone."""
        if epoch != self.sampler.epoch:
            self._start = self._given = 0
        self.sampler.set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        samples = len(self.sampler)
        return samples // self.batch_size if self.last_batch == "drop" else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate the epoch's batches, from where a loaded state left it; an iteration under way ends."""
        if self._running is not None:
            self._running.close()
        start, self._start = self._start, 0
        self._given = start
        self._running = self._iterate(self.batches()[start:])
        return self._running

    def batches(self) -> list[list[int]]:
        """Return the samples of each batch of this rank's epoch."""
        order = list(self.sampler) if len(self.dataset) else []
        batches = [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]
        if self.last_batch == "drop":
            return batches[: len(self)]
        if self.last_batch == "fill" and batches:
            missing = self.batch_size - len(batches[-1])
            batches[-1] = batches[-1] + (order * (missing // len(order) + 1))[:missing]
        return batches

    def state_dict(self) -> dict[str, int]:
        """Return where this epoch stands: after the batches that the loop has had."""
        return {"epoch": self.epoch, "batch": self._given, "settings": self._fingerprint()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken, with the very samples and crops that would have come.

        Raises:
            InvalidArgument: if it was taken with another data set, order, batch size or number of ranks.
        """
        if state["settings"] != self._fingerprint():
            raise InvalidArgument(
                f"the state must be of the same samples, seeds, batch_size, ranks and last_batch, got settings "
                f"{state['settings']}, these are {self._fingerprint()}; go on at the next epoch with "
                f"set_epoch({state['epoch'] + 1})"
            )
        if not 0 <= state["batch"] <= len(self):
            raise InvalidArgument(f"batch must be 0 to {len(self)}, got {state['batch']}")
        self.set_epoch(state["epoch"])
        self._start = self._given = state["batch"]

    def _fingerprint(self) -> int:
        sampler = self.sampler
        settings = (len(self.dataset), self.dataset.seed, sampler.shuffle, sampler.seed, self.batch_size)
        return zlib.crc32(repr((*settings, self.num_replicas, self.last_batch)).encode())

    # -- one epoch ---------------------------------------------------------------------------------------------------

    def _iterate(self, batches: list[list[int]]) -> Batches:
        if not batches:
            return
        graph, self._graph = self._ready(), None
        under_way: deque[list[int]] = deque()
        pool = ThreadPoolExecutor(2, "accel-dali-read")
        try:
            for images in self._decoded(graph, self._read_ahead(batches, pool, under_way), under_way):
                indices = under_way.popleft()
                labels = torch.tensor([self.dataset.samples[index][1] for index in indices], dtype=torch.int64)
                self._given += 1
                # From pageable memory the host would wait for all that the device has queued.
                labels = pin(labels) if self.device.type == "cuda" else labels
                yield images, labels.to(self.device, non_blocking=True)
            # Kept for the next epoch; after a break or an error batches are left inside, and it is thrown away.
            self._graph = graph
        finally:
            if self._graph is not graph:
                graph.close()
            pool.shutdown(cancel_futures=True)

    def _ready(self) -> Graph:
        if self._graph is None:
            self._graph = Graph(
                self.batch_size,
                self.dataset.transform.size,
                self.device,
                self._threads,
                self._prefetch,
                self.dataset.interpolation,
                self.dataset.exif,
            )
        return self._graph

    def _read_ahead(
        self, batches: Iterable[list[int]], pool: ThreadPoolExecutor, under_way: deque[list[int]]
    ) -> Iterator[Batch]:
        reading: deque[tuple[list[int], Future[Batch]]] = deque()
        for indices in (*batches, None, None):
            if indices is not None:
                reading.append((indices, pool.submit(self._read, indices)))
            if reading and (indices is None or len(reading) > 2):
                first, future = reading.popleft()
                batch = future.result()
                under_way.append(first)
                yield batch

    def _read(self, indices: list[int]) -> Batch:
        data, placements = zip(*self.dataset.encoded(indices), strict=True)
        return data, placements

    def _decoded(self, graph: Graph, batches: Iterator[Batch], under_way: deque[list[int]]) -> Iterator[Tensor]:
        try:
            yield from graph.run(batches)
        except RuntimeError as error:
            indices = under_way[0]
            self.dataset.__getitems__(indices)  # says which one it is, if it cannot be read without DALI either
            raise InvalidArgument(f"samples must be readable by DALI, one of {indices} is not: {error}") from error


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if str(chosen) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


class Graph:
    """The pipeline that carries out placements: decode a box, resize it, cut the window, mirror it.

    Nothing in it is random and it reads no file: bytes and placements are fed from outside. So its
    samples are in the order it is given, an epoch ends where the feeding ends, batches may be of
    different sizes, and there is no state of its own that a checkpoint would have to hold.

    Args:
        batch_size: most images of a batch.
        size: height and width of the output, pixels.
        device: "cpu", or a CUDA device: its decoder and its kernels are used then.
        threads: of DALI.
        depth: batches that may be under way.
        interpolation: "bilinear" or "bicubic", both antialiased.
        exif: turn images as their EXIF orientation says.
    """

    def __init__(
        self,
        batch_size: int,
        size: Pair,
        device: torch.device,
        threads: int,
        depth: int,
        interpolation: Interpolation = "bilinear",
        exif: bool = False,
    ) -> None:
        self.size, self.device = size, device
        self._fed: Iterator[Batch] = iter(())
        number = None if device.type == "cpu" else device.index or 0
        self._pipeline = dali().Pipeline(
            batch_size=batch_size, num_threads=threads, device_id=number, prefetch_queue_depth=depth
        )
        with self._pipeline:
            self._pipeline.set_outputs(self._operators(interpolation, exif))
        self._pipeline.build()

    def run(self, batches: Iterator[Batch]) -> Iterator[Tensor]:
        """Yield (B, 3, H, W) uint8 in channels_last for each batch, in memory of its own.

        Batches are drawn ahead. When the iteration is not brought to its end, the graph is of no further use.

        Raises:
            RuntimeError: if DALI cannot decode an image.
        """
        self._fed = batches
        while True:
            try:
                (images,) = self._pipeline.run()
            except StopIteration:
                self._pipeline.reset()
                return
            yield self._copied(images)

    def close(self) -> None:
        """Release the pipeline: it and this graph refer to each other, so only the cycle collector would free them."""
        self._pipeline, self._fed = None, iter(())

    def _operators(self, interpolation: Interpolation, exif: bool) -> Any:
        fn, types = dali().fn, dali().types
        encoded, start, shape, size, window, flip = fn.external_source(
            source=self._next,
            num_outputs=6,
            dtype=[types.UINT8, types.INT32, types.INT32, types.FLOAT, types.INT32, types.INT32],
            ndim=[1, 1, 1, 1, 1, 0],
        )
        images = fn.decoders.image_slice(
            encoded,
            start,
            shape,
            axes=(0, 1),
            device="cpu" if self.device.type == "cpu" else "mixed",
            output_type=types.RGB,
            adjust_orientation=exif,
        )
        filters = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
        images = fn.resize(images, size=size, interp_type=filters[interpolation], antialias=True)
        images = fn.slice(images, start=window, shape=self.size, axes=(0, 1))
        return fn.flip(images, horizontal=flip)

    def _next(self) -> tuple[Any, ...]:
        encoded, placements = next(self._fed)
        boxes, sizes, offsets, flips = zip(*placements, strict=True)
        return (
            [np.frombuffer(data, np.uint8) for data in encoded],
            np.array([box[:2] for box in boxes], np.int32),
            np.array([box[2:] for box in boxes], np.int32),
            np.array(sizes, np.float32),
            np.array(offsets, np.int32),
            np.array(flips, np.int32),
        )

    def _copied(self, images: Any) -> Tensor:
        batch = torch.empty(len(images), *self.size, 3, dtype=torch.uint8, device=self.device)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        dali().plugin.pytorch.feed_ndarray(images.as_tensor(), batch, cuda_stream=stream)
        return batch.permute(0, 3, 1, 2)
