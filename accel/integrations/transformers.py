"""A callback for the Trainer of Hugging Face transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from accel.integrations.callback import TrainingCallback


class TransformersCallback(TrainingCallback, TrainerCallback):
    """Let a Trainer train with `accel.optimize`.

    The Trainer's loop, model, optimizer and checkpoints stay as they are. Its loader is one of accelerate's, which
    takes its batches from a plain DataLoader: strategies for loaders are tried on that one.

    A Trainer tells its callbacks nothing of an exception that ends its training, such as Ctrl-C in a notebook. Call
    `end` then, or plain loops after it are followed too, until the next training begins, with this callback or another.

    Args:
        allow: how far the numbers may move: "exact", "reordered" (default), "reduced" (bfloat16, TF32), "float8",
            "lossy" (compressed gradients).
        budget: what the search may cost: seconds (60), "90s", "2m", or a share of the run ("3%", default).
        enable: names of strategies to try although they are opt-in or beyond `allow`.
        disable: names of strategies not to try.
        report: where the report goes: a `.json` or `.html` file, or a folder.
        cache: whether what is found is remembered for the next run, and tried first there; default True.

    Raises:
        InvalidArgument: if an argument is wrong.

    Example:
        >>> callback = TransformersCallback(allow="reduced")
        >>> Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
        >>> print(callback.report)
    """

    def end(self) -> None:
        """Restore torch after a training that an exception has ended."""
        self._end(together=False)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow the training, whose length is known."""
        self._begin()
        self._lasts(state.max_steps - state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore torch."""
        self._end()
