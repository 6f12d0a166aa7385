"""BERT for masked language modelling: full size BERT-base, tiny four layers of 256; dropout 0.1.

Source: Devlin et al., BERT, NAACL 2019.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from benchmarks.suite.data import texts
from benchmarks.suite.packages import transformers
from benchmarks.suite.workload import Size, Workload


def token_loss(output: Any, target: Tensor) -> Tensor:
    """Return the cross entropy of each token."""
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def make(size: Size) -> Workload:
    """Make the workload: 8 texts of 128 tokens or 32 of 512 a batch, AdamW."""
    options = (
        {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        if size == "tiny"
        else {}
    )
    vocabulary = 4096 if size == "tiny" else 30_522
    model = transformers().BertForMaskedLM(transformers().BertConfig(vocab_size=vocabulary, **options))
    loader = texts(512, 128, vocabulary, 8) if size == "tiny" else texts(512, 512, vocabulary, 32)
    return Workload(model, loader, AdamW(model.parameters(), 1e-4), token_loss)
