"""LoRA on 4-bit weights of bitsandbytes in a budget: the plain step's bits in half the memory."""

import pytest
import torch
from sampling import share
from torch import nn

import memsave_ext as ms
from memsave_ext.remat import functions

LIBRARIES = ["transformers", "peft", "bitsandbytes"]
transformers = peft = bitsandbytes = None  # conftest.py imports them

pytestmark = [
    pytest.mark.skipif(not ms._native.available, reason="remat records natively"),
    pytest.mark.filterwarnings("ignore:remat. the budget of"),
]


def quantize(module):
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            new = bitsandbytes.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, quant_type="nf4",
                compute_dtype=torch.float32,
            )  # fmt: skip
            new.weight = bitsandbytes.nn.Params4bit(
                child.weight.data, requires_grad=False, quant_type="nf4"
            )
            setattr(module, name, new.to("cpu"))
        else:
            quantize(child)


def build(dropout):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, vocab_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    quantize(model.model)
    lora = peft.LoraConfig(
        r=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=dropout
    )
    model = peft.get_peft_model(model, lora)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.02)  # else no gradient passes
    return model.train()


def step(model):
    model.zero_grad()
    torch.manual_seed(3)
    ids = torch.randint(512, (4, 256), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dropout", share([0.0, 0.1], 2, 1))
def test_the_minimum_of_a_step(dropout, monkeypatch):
    model = build(dropout)
    plain = step(model)
    leasts = []
    for known in ((), functions.KNOWN):
        monkeypatch.setattr(functions, "KNOWN", known)
        handle = ms.remat_module(model, budget=0.01)
        for _ in range(3):
            ours = step(model)
            assert len(ours) == len(plain) > 20 and all(map(torch.equal, ours, plain))
        assert handle.peak <= 1.02 * handle.least
        leasts.append(handle.least)
        rows = [row for row in handle.figures().recomputed if "MatMul4Bit" in row.operator]
        assert bool(rows) == bool(known)
        handle.remove()
    assert leasts[1] <= 0.8 * leasts[0]
    assert leasts[1] <= 0.8 * 33.0 * 2**20


class Eighths(nn.Module):
    """Layers of 8 bits, each between others."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(64)) for _ in range(6))
        self.layers = nn.ModuleList(self.layer() for _ in range(6))

    def layer(self):
        layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        layer.weight = bitsandbytes.nn.Int8Params(
            torch.randn(64, 64) / 8, requires_grad=False, has_fp16_weights=False
        )
        return layer.to("cpu")

    def forward(self, x):
        for scale, layer in zip(self.scales, self.layers, strict=True):
            x = nn.functional.silu(layer(x * scale)) * x
        return x.square().mean()


def test_layers_of_8_bits(monkeypatch):
    torch.manual_seed(0)
    model, x = Eighths(), torch.randn(1024, 64)

    def step():
        model.zero_grad()
        loss = model(x)
        loss.backward()
        return [loss.detach(), *(scale.grad for scale in model.scales)]

    plain, leasts = step(), []
    for known in ((), functions.KNOWN):
        monkeypatch.setattr(functions, "KNOWN", known)
        handle = ms.remat_module(model, budget=0.01)
        for _ in range(3):
            assert all(map(torch.equal, step(), plain))
        leasts.append(handle.least)
        handle.remove()
    assert leasts[1] < 0.9 * leasts[0]
