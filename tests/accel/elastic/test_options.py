"""`accel.Elastic`: its checks, and the arguments of `optimize` that it took the place of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel.elastic.scaling_rules import AdaScale
from accel.errors import InvalidArgument


def made() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, DataLoader(TensorDataset(torch.randn(8, 3)), 2), torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_batch_size": "64"}, r"a number of samples or None\. Found: '64'; pass 512"),
        ({"max_batch_size": True}, r"a number of samples or None\. Found: True"),
        ({"scaling_rule": AdaScale()}, r"needs max_batch_size: .* Found: max_batch_size=None; pass both or neither"),
        (
            {"max_batch_size": 8, "scaling_rule": 2},
            r"a rule of accel\.scaling_rules or .* Found: 2; AdaScale\(\) is one",
        ),
        ({"checkpoint": 3}, r"a folder or accel\.Checkpointing\(folder=\.\.\.\)\. Found: 3; pass a path"),
    ],
)
def test_what_can_t_be_is_refused_where_it_is_made(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        accel.Elastic(**arguments)


def test_optimize_takes_nothing_else_for_it() -> None:
    with pytest.raises(InvalidArgument, match=r"elastic must be an accel\.Elastic or None\. Found: a int; pass"):
        accel.optimize(*made(), elastic=512)  # type: ignore[arg-type, call-overload]


def test_the_old_arguments_of_optimize_do_the_same_and_warn(tmp_path: Path) -> None:
    model, loader, optimizer = made()
    text = r"optimize\(max_batch_size=, checkpoint=\) is now elastic=accel\.Elastic\(max_batch_size=, checkpoint=\)"
    with pytest.warns(FutureWarning, match=text) as caught:
        accel.optimize(model, loader, optimizer, max_batch_size=4, checkpoint=tmp_path, cache=False)  # type: ignore[call-overload]
    assert [warning.filename for warning in caught] == [__file__]
    accel.save_checkpoint(model)
    accel.undo(model)
    assert list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_old_argument_that_is_wrong_is_refused_as_the_new_one() -> None:
    with pytest.raises(InvalidArgument, match=r"checkpoint must be a folder .* Found: 3"):
        accel.optimize(*made(), checkpoint=3)  # type: ignore[call-overload]
