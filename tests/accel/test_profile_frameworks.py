"""`accel profile` on loops that a framework owns: Lightning and the Hugging Face Trainer, where they are installed."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from accel.profiler import report as schema
from tests.accel.frameworks import LET_TORCHVISION_IMPORT, need
from tests.accel.profiled import accel_profile

LIGHTNING = """
import time
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)

def data(kind, size):
    return DataLoader(kind(torch.randn(size, 32), torch.zeros(size, dtype=torch.long)), batch_size=8)

if __name__ == "__main__":
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), data(Slow, 640), data(TensorDataset, 32))
"""

TRAINER = """
import time
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1280
    def __getitem__(self, index):
        time.sleep(0.002)
        return {"x": torch.randn(32), "labels": 0}

if __name__ == "__main__":
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True,
    )
    Trainer(model=Net(), args=arguments, train_dataset=Slow()).train()
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("framework", "body"),
    [("lightning", LIGHTNING), ("transformers", TRAINER)],
)
def test_a_framework_s_loop_is_seen_whole(framework: str, body: str, tmp_path: Path) -> None:
    need(framework)
    (tmp_path / "train.py").write_text(textwrap.dedent(body))
    done = accel_profile(tmp_path, "train.py", before=LET_TORCHVISION_IMPORT)

    assert done.returncode == 0, done.stderr
    found = schema.from_json((tmp_path / "accel-profile" / "report.json").read_text())
    assert found.steps > 80
    assert found.unattributed <= 0.02
    assert found.host.loader.startswith("DataLoader")
    phases = found.ranks[0].phases_ms
    assert all(phases[phase] > 0 for phase in ("data", "forward", "backward", "optimizer"))
    assert [finding.cause for finding in found.findings][:1] == ["input.storage"], (found.verdict, found.unseen)
    assert found.findings[0].confirmed
