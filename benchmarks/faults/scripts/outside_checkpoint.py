"""Fine-tune on top of a large frozen table of word vectors, with a checkpoint every 20 steps."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64
WORDS, WIDTH = 180_000, 256


class Tagger(nn.Module):
    """Looks words up in a frozen table, then classifies their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.randn(WORDS, WIDTH), freeze=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 1536), nn.ReLU(), nn.Linear(1536, 768), nn.ReLU())
        self.head = nn.Linear(768, 10)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.table(words).mean(1)))
        return scores


def main() -> None:
    options = arguments(__doc__)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randint(WORDS, (4096, 8)), torch.randint(10, (4096,)))
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
    model = Tagger()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    watch = Stopwatch(BATCH)
    with tempfile.TemporaryDirectory() as folder:

        def save() -> None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": watch.steps}
            torch.save(state, Path(folder) / "checkpoint.pt")

        while watch.steps < options.steps:
            for words, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(words), labels)
                loss.backward()
                optimizer.step()
                if (watch.steps + 1) % 20 == 0 and not options.fixed:
                    save()
                watch.lap()
                if watch.steps == options.steps:
                    break
        save()
    print(watch.line())


if __name__ == "__main__":
    main()
