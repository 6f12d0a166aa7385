"""Batches that hang on a graph, of a table that is trained in the collate function: the loop makes them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from accel.dataio.loader import ContinuousLoader
from accel.dataio.passes import tuner


class Words(Dataset[Tensor]):
    """Few words, which come in each batch: one computed with old weights differs."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index % 3)


def trained(wrap: Callable[[DataLoader[Any]], Any], epochs: int = 2, *, evaluates: bool = False) -> list[float]:
    """Train the table, and return the losses; each epoch may begin with those of a pass without gradients."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(3, 2)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.05)
    loader = wrap(DataLoader(Words(), 4, collate_fn=lambda samples: table(torch.stack(samples))))
    losses = []
    for _ in range(epochs):
        if evaluates:
            with torch.no_grad():
                losses += [float(batch.square().sum()) for batch in loader]
        for batch in loader:
            loss = batch.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    if isinstance(loader, ContinuousLoader):
        loader.close()
    return losses


PLAIN = trained(lambda loader: loader)


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}], ids=str)
def test_a_table_is_trained_as_by_the_plain_loader(options: dict[str, Any]) -> None:
    """With a device, too, where batches are else made one ahead of the step."""
    assert trained(lambda loader: ContinuousLoader(loader, mode="inline", **options)) == PLAIN


def test_threads_go_on_in_the_loop() -> None:
    with pytest.warns(UserWarning, match="batches hang on a graph.*goes on in the loop's own thread"):
        assert trained(lambda loader: ContinuousLoader(loader, mode="threads", num_workers=2)) == PLAIN


def test_what_threads_made_ahead_without_gradients_is_not_trained_on() -> None:
    """It was, and was an error in the first step after an evaluation of the training samples."""
    plain = trained(lambda loader: loader, evaluates=True)
    with pytest.warns(UserWarning, match="batches hang on a graph"):
        assert trained(lambda loader: ContinuousLoader(loader, mode="threads", num_workers=2), evaluates=True) == plain


def test_a_process_does_not_send_a_graph_as_a_leaf() -> None:
    with pytest.raises(TypeError, match="hangs on a graph can't be sent to another process"):
        trained(lambda loader: ContinuousLoader(loader, mode="fork", num_workers=1))


def test_auto_leaves_them_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_NEGLIGIBLE": -1.0, "_BLOCK_S": 0.0, "_FIRST_S": 0.0}.items():
        monkeypatch.setattr(tuner, name, value)
    loaders = []

    def wrap(loader: DataLoader[Any]) -> Any:
        loaders.append(ContinuousLoader(loader, num_workers=1))
        return loaders[0]

    epochs = 12
    assert trained(wrap, epochs) == trained(lambda loader: loader, epochs)
    assert loaders[0].explain().count("which each step changes") == 2  # why no threads, and why no process
