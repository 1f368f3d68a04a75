"""Rematerialization of transformers' models, and under its Trainer: the same bits."""

import warnings

import pytest
import torch

import memsave_ext as ms

LIBRARIES = ["transformers"]
transformers = None  # conftest.py imports it

pytestmark = pytest.mark.skipif(not ms._native.available, reason="remat records natively")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}


def bert():
    config = transformers.BertConfig(
        **SMALL, num_attention_heads=4, hidden_dropout_prob=0.1, max_position_embeddings=32
    )
    return transformers.BertForMaskedLM(config)


def llama():
    config = transformers.LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def train(build, change):
    """Two steps; parameters afterwards."""
    torch.manual_seed(0)
    model = build().train()
    handle = change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(48).view(3, 16) % 50
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return list(model.parameters()), handle


@pytest.mark.parametrize("build", [bert, llama, gpt2], ids=lambda build: build.__name__)
def test_models(build):
    plain, _ = train(build, lambda model: None)
    ours, handle = train(build, lambda model: ms.remat_module(model, _everything=True))
    assert all(map(torch.equal, plain, ours))
    assert handle.figures().dropped_bytes > 0.3 * handle.figures().kept_bytes
    cheap, _ = train(build, ms.remat_module)
    assert all(map(torch.equal, plain, cheap))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_inside(use_reentrant):
    def alone(model):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})

    def both(model):
        alone(model)
        return ms.remat_module(model, _everything=True)

    plain, _ = train(gpt2, alone)
    ours, handle = train(gpt2, both)
    assert all(map(torch.equal, plain, ours))
    assert handle.figures().dropped_bytes > 0


def gemma2():
    """Its logits are capped."""
    config = transformers.Gemma2Config(
        **SMALL, num_attention_heads=4, head_dim=8, final_logit_softcapping=2.0
    )
    return transformers.Gemma2ForCausalLM(config)


@pytest.mark.parametrize("build", [llama, gpt2, gemma2], ids=lambda build: build.__name__)
def test_a_loss_without_logits_is_planned_from_the_first_step_on(build):
    """The patch looks once at what the model does to logits, which is in no other step."""
    ms._C.remat_forget()
    torch.manual_seed(0)
    model = build().train()
    ms.patch_causal_lm(model)
    optimizer = ms.AdamW(model.parameters(), in_backward=True)
    handle = ms.remat_module(model, budget=0.5)
    tokens = torch.arange(480).view(30, 16) % 50
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        assert "of a budget of" in " ".join(handle.report().split())
        assert handle.peak <= 1.02 * max(handle.budget, handle.least)
        assert handle.figures().dropped_bytes > 0


def test_what_a_model_raises_after_its_head_leaves_blocks_recording():
    model = gpt2().train()
    ms.patch_causal_lm(model)
    tokens = torch.arange(48).view(3, 16)
    with pytest.raises(TypeError):
        model(input_ids=tokens, labels=tokens, num_items_in_batch="many")
    wrong = tokens.clone()
    wrong[0, 3] = 50
    with pytest.raises(IndexError, match="out of bounds"):
        model(input_ids=tokens, labels=wrong)
    block = ms.remat(_everything=True)
    with block:
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert block.figures().dropped_bytes > 0


def test_an_interrupt_after_its_head_leaves_later_blocks_recording():
    """No hook of torch's modules sees an interrupt, so that the model itself cannot notice it."""
    model = gpt2().train()
    ms.patch_causal_lm(model)
    tokens = torch.arange(48).view(3, 16)

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = model.get_output_embeddings().register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), ms.remat(_everything=True):
        model(input_ids=tokens, labels=tokens)
    x = torch.randn(64, requires_grad=True)
    with (block := ms.remat(_everything=True)):
        loss = x.exp().sin().sum()
    loss.backward()
    assert block.figures().dropped_bytes > 0
    hook.remove()
    with (block := ms.remat(_everything=True)):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert block.figures().dropped_bytes > 0
