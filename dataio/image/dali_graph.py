"""The DALI pipeline that carries out placements: decode a box, resize it, cut the window, mirror it.

Nothing in it is random and it reads no file: bytes and placements are fed from outside. So its samples are in the order
it is given, an epoch ends where the feeding ends, batches may be of different sizes, and there is no state of its own
that a checkpoint would have to hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel.dataio.image.libraries import dali
from accel.dataio.image.resize import Interpolation
from accel.dataio.image_geometry import Pair, Placement

Batch = tuple[Sequence[bytes], Sequence[Placement]]


class Graph:
    """Turn encoded images into batches, a few at a time.

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
