"""accel: a performance toolkit for PyTorch training.

    model, loader = accel.optimize(model, loader)

`import accel` imports nothing heavy: torch is loaded when the first public name is used.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel import startup

__version__ = "0.1.0"

# To which a relative ACCEL_CACHE refers: scripts change to a directory of their own for each run.
try:
    _imported_in = os.getcwd()
except OSError:  # it has been deleted
    _imported_in = ""

# Module → the public names that it holds. Loaded on first use, so that `import accel` stays free of torch.
# fmt: off
_NAMES = {
    "comm.bandwidth": "measure_links", "comm.catalogue": "register_compressor",
    "comm.compressor": "Compressor Exact Stage", "comm.compressor_memory": "reshard", "comm.dgc": "DGC",
    "comm.fsdp": "FSDPComm", "comm.half": "Half", "comm.hooks": "CommState hook", "comm.int8": "Int8",
    "comm.local_sgd": "LocalSGD", "comm.one_bit": "OneBit", "comm.powersgd": "PowerSGD",
    "comm.ranks.failure": "CommError", "comm.selector": "AutoComm", "comm.sgd_momentum": "take_momentum",
    "dataio.dali": "DaliLoader",
    "dataio.elastic_sampler": "ElasticSampler", "dataio.image_geometry": "RandomResizedCrop Resize ResizeCenterCrop",
    "dataio.image_normalize": "Normalize", "dataio.images": "ImageDataset ImageFolder Slice collate_images tar_samples",
    "dataio.length_balance": "LengthBalancedBatchSampler", "dataio.loader": "ContinuousLoader",
    "dataio.packing": "PackCollate pack unpack", "dataio.sample_cache": "SampleCache",
    "dataio.token_loss": "count_tokens global_tokens scale_gradients token_mean", "elastic.checkpoint": "Checkpoints",
    "elastic.learning_rate": "LearningRateScaler", "elastic.local_job": "LocalJob",
    "elastic.options": "Checkpointing Elastic", "elastic.progress": "ProgressSchedule",
    "elastic.running": "job_profile progress_of request_checkpoint save_checkpoint",
    "elastic.sample_position": "remaining_epochs", "elastic.save_policy": "SavePolicy",
    "elastic.scaling_rules": "BatchScale", "elastic.training_state": "capture_state restore_state",
    "elastic.worker_signals": "outliving", "entry": "disabled explain optimize undo",
    "errors": "AccelError CheckpointError InvalidArgument InvalidState InvalidType PlanError ReportError",
    "goodput.efficiency": "NoiseInterval", "goodput.fit": "fit_throughput",
    "goodput.goodput": "BatchLimits SpeedTable", "goodput.job": "JobProfile", "goodput.noise_meter": "NoiseMeter",
    "goodput.observations": "Configuration Observations", "goodput.throughput": "ThroughputModel",
    "integrations.trackers": "log_batches log_report", "kernels.bernoulli": "bernoulli_",
    "kernels.compact": "compact", "kernels.fcos_heads": "patch_fcos_head unpatch_fcos_head",
    "kernels.fcos_targets": "FcosConfig FcosGts FcosPoints fcos3d_targets fcos_targets",
    "kernels.gather_rows": "gather_rows", "kernels.simota": "simota_assign",
    "kernels.simota_heads": "BatchedSimOTAAssigner patch_yolox_head unpatch_yolox_head",
    "kernels.simota_yolov7": "patch_yolov7_loss unpatch_yolov7_loss",
    "kernels.window_attention": "shifted_window_attention window_attention",
    "kernels.window_dropins": "fuse_window_attention", "precision": "fp32_precision",
    "profiler.trial": "Trial TrialConfig", "report": "Report", "scores": "report_score", "search.plan": "Plan",
}
_MODULES = {name: f"accel.{name}" for name in ("amp", "graphs", "optim")}
_MODULES["scaling_rules"] = "accel.elastic.scaling_rules"
_HOMES = {name: f"accel.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [  # noqa: RUF022  (the order of `sorted`)
    "AccelError", "AutoComm", "BatchLimits", "BatchScale", "BatchedSimOTAAssigner", "CheckpointError",
    "Checkpointing", "Checkpoints", "CommError", "CommState", "Compressor", "Configuration", "ContinuousLoader",
    "DGC", "DaliLoader", "Elastic", "ElasticSampler", "Exact", "FSDPComm", "FcosConfig", "FcosGts", "FcosPoints",
    "Half", "ImageDataset", "ImageFolder", "Int8", "InvalidArgument", "InvalidState", "InvalidType", "JobProfile",
    "LearningRateScaler", "LengthBalancedBatchSampler", "LocalJob", "LocalSGD", "NoiseInterval", "NoiseMeter",
    "Normalize", "Observations", "OneBit", "PackCollate", "Plan", "PlanError", "PowerSGD", "ProgressSchedule",
    "RandomResizedCrop", "Report", "ReportError", "Resize", "ResizeCenterCrop", "SampleCache", "SavePolicy",
    "Slice", "SpeedTable", "Stage", "ThroughputModel", "Trial", "TrialConfig", "__version__", "amp", "bernoulli_",
    "capture_state", "collate_images", "compact", "count_tokens", "disabled", "explain", "fcos3d_targets",
    "fcos_targets", "fit_throughput", "fp32_precision", "fuse_window_attention", "gather_rows", "global_tokens",
    "graphs", "hook", "job_profile", "log_batches", "log_report", "measure_links", "optim", "optimize", "outliving",
    "pack", "patch_fcos_head", "patch_yolov7_loss", "patch_yolox_head", "progress_of", "register_compressor",
    "remaining_epochs", "report_score", "request_checkpoint", "reshard", "restore_state", "save_checkpoint",
    "scale_gradients", "scaling_rules", "shifted_window_attention", "simota_assign", "take_momentum", "tar_samples",
    "token_mean", "undo", "unpack", "unpatch_fcos_head", "unpatch_yolov7_loss", "unpatch_yolox_head",
    "window_attention",
]
# fmt: on

if TYPE_CHECKING:
    from accel import amp, graphs, optim
    from accel.comm.bandwidth import measure_links
    from accel.comm.catalogue import register_compressor
    from accel.comm.compressor import Compressor, Exact, Stage
    from accel.comm.compressor_memory import reshard
    from accel.comm.dgc import DGC
    from accel.comm.fsdp import FSDPComm
    from accel.comm.half import Half
    from accel.comm.hooks import CommState, hook
    from accel.comm.int8 import Int8
    from accel.comm.local_sgd import LocalSGD
    from accel.comm.one_bit import OneBit
    from accel.comm.powersgd import PowerSGD
    from accel.comm.ranks.failure import CommError
    from accel.comm.selector import AutoComm
    from accel.comm.sgd_momentum import take_momentum
    from accel.dataio.dali import DaliLoader
    from accel.dataio.elastic_sampler import ElasticSampler
    from accel.dataio.image_geometry import RandomResizedCrop, Resize, ResizeCenterCrop
    from accel.dataio.image_normalize import Normalize
    from accel.dataio.images import ImageDataset, ImageFolder, Slice, collate_images, tar_samples
    from accel.dataio.length_balance import LengthBalancedBatchSampler
    from accel.dataio.loader import ContinuousLoader
    from accel.dataio.packing import PackCollate, pack, unpack
    from accel.dataio.sample_cache import SampleCache
    from accel.dataio.token_loss import count_tokens, global_tokens, scale_gradients, token_mean
    from accel.elastic import scaling_rules
    from accel.elastic.checkpoint import Checkpoints
    from accel.elastic.learning_rate import LearningRateScaler
    from accel.elastic.local_job import LocalJob
    from accel.elastic.options import Checkpointing, Elastic
    from accel.elastic.progress import ProgressSchedule
    from accel.elastic.running import job_profile, progress_of, request_checkpoint, save_checkpoint
    from accel.elastic.sample_position import remaining_epochs
    from accel.elastic.save_policy import SavePolicy
    from accel.elastic.scaling_rules import BatchScale
    from accel.elastic.training_state import capture_state, restore_state
    from accel.elastic.worker_signals import outliving
    from accel.entry import disabled, explain, optimize, undo
    from accel.errors import (
        AccelError,
        CheckpointError,
        InvalidArgument,
        InvalidState,
        InvalidType,
        PlanError,
        ReportError,
    )
    from accel.goodput.efficiency import NoiseInterval
    from accel.goodput.fit import fit_throughput
    from accel.goodput.goodput import BatchLimits, SpeedTable
    from accel.goodput.job import JobProfile
    from accel.goodput.noise_meter import NoiseMeter
    from accel.goodput.observations import Configuration, Observations
    from accel.goodput.throughput import ThroughputModel
    from accel.integrations.trackers import log_batches, log_report
    from accel.kernels.bernoulli import bernoulli_
    from accel.kernels.compact import compact
    from accel.kernels.fcos_heads import patch_fcos_head, unpatch_fcos_head
    from accel.kernels.fcos_targets import FcosConfig, FcosGts, FcosPoints, fcos3d_targets, fcos_targets
    from accel.kernels.gather_rows import gather_rows
    from accel.kernels.simota import simota_assign
    from accel.kernels.simota_heads import BatchedSimOTAAssigner, patch_yolox_head, unpatch_yolox_head
    from accel.kernels.simota_yolov7 import patch_yolov7_loss, unpatch_yolov7_loss
    from accel.kernels.window_attention import shifted_window_attention, window_attention
    from accel.kernels.window_dropins import fuse_window_attention
    from accel.precision import fp32_precision
    from accel.profiler.trial import Trial, TrialConfig
    from accel.report import Report
    from accel.scores import report_score
    from accel.search.plan import Plan


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _MODULES:
        import difflib

        near = difflib.get_close_matches(name, __all__, n=1, cutoff=0.7)
        meant = f"did you mean accel.{near[0]}?" if near else f"public names: {', '.join(__all__)}"
        raise AttributeError(f"module 'accel' has no attribute {name!r}; {meant}")
    with startup.counted() if "torch" in sys.modules else contextlib.nullcontext():  # else most of it is torch
        value = import_module(_MODULES[name]) if name in _MODULES else getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
