"""An LSTM language model, as in pytorch/examples: two layers, dropout, SGD with clipped gradients.

Source: Zaremba et al., Recurrent Neural Network Regularization, 2014.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from benchmarks.suite.data import texts
from benchmarks.suite.workload import Size, Workload


class LanguageModel(nn.Module):
    """Predict each next token of a text."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.drop, self.table = nn.Dropout(0.2), nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores [B, N, V] of the tokens that follow."""
        states, _ = self.lstm(self.drop(self.table(text)))
        return self.head(self.drop(states))  # type: ignore[no-any-return]


def text_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each token."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def make(size: Size) -> Workload:
    """Make the workload: 20 texts of 35 tokens or 64 of 70 a batch, gradients clipped to 0.25."""
    model = LanguageModel(10_000, 200) if size == "tiny" else LanguageModel(33_278, 650)
    loader = texts(2000, 35, 10_000, 20) if size == "tiny" else texts(4096, 70, 33_278, 64)
    return Workload(model, loader, SGD(model.parameters(), 20.0), text_loss, 0.25)
