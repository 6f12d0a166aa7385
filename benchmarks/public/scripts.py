"""The list: public training scripts, each at one commit, with the arguments that make a run of it short."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.public import data

COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "yunjey/pytorch-tutorial": "0500d3df5a2a8080ccfccbc00aca0eacc21818db",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
}


def _nothing(folder: Path) -> None:
    """The script makes its own data."""


@dataclass(frozen=True)
class PublicScript:
    """A script, and how to run it.

    Args:
        repo: on GitHub, owner/name.
        script: its path there.
        arguments: of a short run.
        data: makes what it reads.
        data_at: where, from the script's folder.
        before: scripts of the same folder to run first.
        longer: of a run in which a search comes to its end, after the others; None if it can't be longer.
        repeats: two plain runs give the same result.
        environment: variables that it needs.
    """

    repo: str
    script: str
    arguments: tuple[str, ...] = ()
    data: Callable[[Path], None] = _nothing
    data_at: str = "."
    before: tuple[str, ...] = ()
    longer: tuple[str, ...] | None = None
    repeats: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def prepare(self, source: Path, folder: Path) -> Path:
        """Copy the repository from `source` into `folder`, make the data, and return the script's path there."""
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git"))
        script = folder / self.script
        self.data(script.parent / self.data_at)
        for first in self.before:
            subprocess.run(
                [sys.executable, first], cwd=script.parent, check=True, stdout=subprocess.DEVNULL, timeout=600
            )
        return script


_EXAMPLES, _TUTORIAL = "pytorch/examples", "yunjey/pytorch-tutorial"
_TUTORIALS = "tutorials/02-intermediate"


def _mnist(
    repo: str, script: str, *arguments: str, data_at: str = "../data", longer: tuple[str, ...] | None = None
) -> PublicScript:
    return PublicScript(repo, script, arguments, data=data.mnist, data_at=data_at, longer=longer)


SCRIPTS = {
    "mnist": _mnist(_EXAMPLES, "mnist/main.py", "--epochs", "5", "--save-model", longer=("--epochs", "8")),
    "mnist_rnn": _mnist(_EXAMPLES, "mnist_rnn/main.py", "--epochs", "5", "--save-model", longer=("--epochs", "40")),
    # Its processes race each other.
    "mnist_hogwild": replace(_mnist(_EXAMPLES, "mnist_hogwild/main.py", "--epochs", "1"), repeats=False),
    "forward_forward": _mnist(
        _EXAMPLES,
        *("mnist_forward_forward/main.py", "--epochs", "60", "--train_size", "2000", "--save_model"),
        data_at="data",
    ),
    "siamese": _mnist(_EXAMPLES, "siamese_network/main.py", "--epochs", "1", "--save-model", longer=("--epochs", "3")),
    "vae": _mnist(_EXAMPLES, "vae/main.py", "--epochs", "8", longer=("--epochs", "60")),
    "dcgan": PublicScript(
        _EXAMPLES,
        "dcgan/main.py",
        (
            "--dataset",
            "fake",
            "--ngf",
            "16",
            "--ndf",
            "16",
            "--batchSize",
            "32",
            "--workers",
            "0",
            "--manualSeed",
            "1",
            "--niter",
            "2",
        ),
        longer=("--niter", "12"),
    ),
    "imagenet": PublicScript(
        _EXAMPLES,
        "imagenet/main.py",
        (
            *("pictures", "--arch", "mobilenet_v3_small", "--batch-size", "16", "--workers", "0"),
            *("--seed", "1", "--epochs", "1"),
        ),
        longer=("--epochs", "8"),
        data=data.pictures,
        data_at="pictures",
    ),
    "word_language_model": PublicScript(
        _EXAMPLES,
        "word_language_model/main.py",
        ("--epochs", "1", "--use-optimizer", "--lr", "0.01"),
        longer=("--epochs", "4"),
        data=data.wikitext,
        data_at="data/wikitext-2",
    ),
    "sine_waves": PublicScript(
        _EXAMPLES,
        "time_sequence_prediction/train.py",
        ("--steps", "1"),
        before=("generate_sine_wave.py",),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},  # it reads an array of numpy's
    ),
    "regression": PublicScript(_EXAMPLES, "regression/main.py"),
    "tutorial_cnn": _mnist(
        _TUTORIAL, f"{_TUTORIALS}/convolutional_neural_network/main.py", data_at="../../data", longer=()
    ),
    "tutorial_rnn": _mnist(_TUTORIAL, f"{_TUTORIALS}/recurrent_neural_network/main.py", data_at="../../data"),
    "nanogpt": PublicScript(
        "karpathy/nanoGPT",
        "train.py",
        (
            "config/train_shakespeare_char.py",
            *("--device=cpu", "--compile=False", "--eval_iters=4", "--eval_interval=100", "--log_interval=10"),
            *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.1"),
            *("--max_iters=300", "--lr_decay_iters=300", "--always_save_checkpoint=True"),
        ),
        longer=("--max_iters=800",),
        data=data.characters,
        data_at="data/shakespeare_char",
    ),
    "mingpt_adder": PublicScript(
        "karpathy/minGPT",
        "projects/adder/adder.py",
        ("--trainer.max_iters=300", "--trainer.num_workers=0"),
        longer=("--trainer.max_iters=2400",),
    ),
}


def fetch(repo: str, folder: Path) -> Path:
    """Return the repository in `folder`, by its name; it is fetched from GitHub if it isn't there."""
    place = folder / repo.partition("/")[2]
    if not place.exists():
        place.mkdir(parents=True)
        for arguments in (
            ("init", "--quiet"),
            ("fetch", "--quiet", "--depth", "1", f"https://github.com/{repo}", COMMITS[repo]),
            ("checkout", "--quiet", "FETCH_HEAD"),
        ):
            subprocess.run(["git", *arguments], cwd=place, check=True)
    return place
