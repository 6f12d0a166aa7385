"""The name of the device that a model is on."""

from __future__ import annotations

import torch

from accel.profiler.host import cpu_name


def machine_name(device: torch.device) -> str:
    """Return the device's name, e.g. `cpu (AMD EPYC)`."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({cpu_name()})" if device.type == "cpu" else device.type
