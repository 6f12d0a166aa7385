"""Models of timm and transformers, captured on the stand-in: the bits of eager steps, whatever they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accel.graphs.model_loops import both
from tests.kernels.hosts import need

pytestmark = pytest.mark.slow

TIMM = {
    "resnet18": {"drop_path_rate": 0.1},
    "efficientnet_b0": {"drop_rate": 0.2, "drop_path_rate": 0.1},
    "vit_tiny_patch16_224": {"img_size": 64, "drop_rate": 0.1},
    "convnext_atto": {"drop_path_rate": 0.1},
    "mixer_s32_224": {"img_size": 64},
}
SMALL = {"vocab_size": 100}
BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, **SMALL}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False, **SMALL}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "use_cache": False, **SMALL}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": ("BertConfig", BERT),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "T5ForConditionalGeneration": ("T5Config", {"decoder_start_token_id": 0, **T5}),
    "LlamaForCausalLM": ("LlamaConfig", {**BERT, "num_key_value_heads": 2, "use_cache": False}),
}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    need("timm")
    import timm

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        results = []
        for seed in range(6):
            optimizer.zero_grad()
            x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            results.append(loss.detach())
        return results

    calls = both(loop, lambda: timm.create_model(name, num_classes=10, **TIMM[name]), warmup=2)
    assert (calls.captures, calls.replays, calls.why_eager) == (1, 4, [])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need("transformers")
    import transformers

    # They ask CUDA whether it captures, and then look at no value.
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    config, options = TRANSFORMERS[name]

    def make() -> nn.Module:
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
        return model

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        results = []
        for seed in range(6):
            optimizer.zero_grad()
            words = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(seed))
            outputs = model(input_ids=words, labels=words)
            outputs.loss.backward()
            optimizer.step()
            results += [outputs.loss.detach(), outputs["logits"].detach()]
        return results

    calls = both(loop, make, warmup=2)
    assert (calls.captures, calls.replays, calls.why_eager) == (1, 4, [])
