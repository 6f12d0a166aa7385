"""A decoder of GPT-2's kind: full size GPT-2 small, tiny four layers of 192; dropout 0.1.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from __future__ import annotations

from torch.optim import AdamW

from benchmarks.suite.bert import token_loss
from benchmarks.suite.data import texts
from benchmarks.suite.packages import transformers
from benchmarks.suite.workload import Size, Workload


def make(size: Size) -> Workload:
    """Make the workload: 12 texts of 128 tokens or of 1,024 a batch, AdamW, gradients clipped to 1."""
    tokens, vocabulary = (128, 4096) if size == "tiny" else (1024, 50_257)
    options = {"n_embd": 192, "n_layer": 4, "n_head": 4} if size == "tiny" else {}
    ends = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1}
    config = transformers().GPT2Config(vocab_size=vocabulary, n_positions=tokens, use_cache=False, **ends, **options)
    model = transformers().GPT2LMHeadModel(config)
    return Workload(
        model, texts(512, tokens, vocabulary, 12), AdamW(model.parameters(), 6e-4, weight_decay=0.1), token_loss, 1.0
    )
