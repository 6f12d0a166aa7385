"""A callback for the Trainer of Lightning."""

from __future__ import annotations

from typing import Any

from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping, Timer

from accel.integrations.callback import TrainingCallback
from accel.integrations.trackers import log_report

_UNTOLD_EPOCHS = 1000
"""What Lightning sets where nobody has set a bound."""


class LightningCallback(TrainingCallback, Callback):
    """Let a Trainer train with `accel.optimize`; the figures go to its loggers when the training ends.

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
        >>> callback = LightningCallback()
        >>> lightning.Trainer(callbacks=[callback]).fit(model, loader)
        >>> print(callback.report)
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the training, before its loaders are asked for an iterator."""
        self._begin()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the length of the training, which a checkpoint may have begun, unless something may end it sooner."""
        may_end = any(isinstance(each, EarlyStopping | Timer) for each in trainer.callbacks)
        is_told = trainer.max_steps > 0 or trainer.max_epochs not in (None, -1, _UNTOLD_EPOCHS)
        if is_told and not may_end and pl_module.automatic_optimization:
            self._lasts(trainer.estimated_stepping_batches - trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore torch, and log the figures."""
        self._end()
        if self.report is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                log_report(self.report, logger, trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore torch."""
        self._end(together=False)
