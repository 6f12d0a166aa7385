"""What `accel doctor` says of this machine and its Python: what a bug report needs."""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

from accel import __version__

_PACKAGES = (
    *("torchvision", "transformers", "lightning", "accelerate", "timm", "triton", "scipy", "simplejpeg"),
    *("nvidia-dali-cuda120", "nvidia-dali-cuda130", "ray", "kubernetes", "optuna"),
)
_VARIABLES = ("ACCEL", "ACCEL_CACHE", "ACCEL_DATA", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that change what accel or torch does; those of NCCL and gloo are the network's."""
_GIB = 2**30


def environment() -> dict[str, str]:
    """Return facts of the software and of the machine as this process sees it, by name.

    Example:
        >>> environment()["torch"].split()[0]  # doctest: +SKIP
        '2.13.0+cpu'
    """
    import torch

    from accel.profiler import cgroup, host

    cores, quota = host.usable_cores(), cgroup.quota()
    memory = host.total_memory()
    limited = "" if quota is None else f", a quota of {quota:g}"
    instructions = torch.backends.cpu.get_cpu_capability()
    facts = {
        "accel": __version__,
        "python": f"{platform.python_version()} ({platform.platform()})",
        "torch": f"{torch.__version__}, built for {_built_for()}",
        "packages": ", ".join(_installed()) or "none of those that accel can use",
        "cpu": f"{host.cpu_name()}, {cores} cores usable{limited}, {instructions}",
        "threads": f"torch {torch.get_num_threads()}, between operators {torch.get_num_interop_threads()}",
        "memory": "not known" if memory is None else f"{memory / _GIB:.1f} GiB",
        "shared memory": _space(Path("/dev/shm")),
        "plan cache": _cache(),
        "variables": ", ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ) or "none set",
    }
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    return {**facts, **({f"gpu {index}": text for index, text in enumerate(gpus)} or {"gpu": "none that torch sees"})}


def _built_for() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"


def _gpu(index: int) -> str:
    import torch

    what = torch.cuda.get_device_properties(index)
    return f"{what.name}, {what.total_memory / _GIB:.0f} GiB, compute capability {what.major}.{what.minor}"


def _installed() -> list[str]:
    """Return the installed packages that accel can use, with their versions."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return versions


def _space(folder: Path) -> str:
    try:
        space = shutil.disk_usage(folder)
    except OSError:
        return f"{folder}: not there"
    return f"{folder}: {space.free / _GIB:.1f} of {space.total / _GIB:.1f} GiB free"


def _cache() -> str:
    from accel.cache.folder import NoFolder, cache_folder

    try:
        folder = cache_folder()
    except NoFolder as reason:
        return f"none: {reason}" if str(reason) else "switched off by ACCEL_CACHE=0"
    plans = sum(1 for _ in folder.glob("*")) if folder.is_dir() else 0
    return f"{folder}: {plans} files"
