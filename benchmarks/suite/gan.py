"""DCGAN: the generator is the model; its step trains the discriminator too.

Source: Radford et al., Unsupervised Representation Learning with Deep Convolutional GANs, ICLR 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.suite.workload import Size, Workload

BETAS = (0.5, 0.999)


def generator(noise: int, width: int) -> nn.Sequential:
    """Return a network from noise [B, noise, 1, 1] to images [B, 3, 32, 32]."""
    layers: list[nn.Module] = [nn.ConvTranspose2d(noise, 4 * width, 4), nn.BatchNorm2d(4 * width), nn.ReLU()]
    for inputs, outputs in ((4 * width, 2 * width), (2 * width, width)):
        layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())


def discriminator(width: int) -> nn.Sequential:
    """Return a network from images [B, 3, 32, 32] to a score each."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for inputs, outputs in ((width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(4 * width, 1, 4), nn.Flatten())


class Critic:
    """The other half of the game: judges what was generated, and learns from it."""

    def __init__(self, width: int) -> None:
        self.model = discriminator(width)
        self.optimizer = Adam(self.model.parameters(), 2e-4, betas=BETAS)
        self.fake = torch.empty(0)

    def judge(self, fake: Tensor, real: Tensor) -> Tensor:
        """Return the generator's loss."""
        self.fake = fake.detach()
        score = self.model.to(real.device)(fake)
        return binary_cross_entropy_with_logits(score, torch.ones_like(score))

    def learn(self, real: Tensor) -> None:
        """Train on real images and on those just generated."""
        self.optimizer.zero_grad()
        right, wrong = self.model(real), self.model(self.fake)
        loss = binary_cross_entropy_with_logits(right, torch.ones_like(right))
        loss = loss + binary_cross_entropy_with_logits(wrong, torch.zeros_like(wrong))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def make(size: Size) -> Workload:
    """Make the workload: 32 or 128 images of 32x32 a batch, Adam."""
    width, batch = (32, 32) if size == "tiny" else (128, 128)
    model, critic = generator(100, width), Critic(width)
    data = TensorDataset(torch.randn(1024, 100, 1, 1), torch.rand(1024, 3, 32, 32) * 2 - 1)
    optimizer = Adam(model.parameters(), 2e-4, betas=BETAS)
    return Workload(model, DataLoader(data, batch, shuffle=True), optimizer, critic.judge, beside=critic.learn)
