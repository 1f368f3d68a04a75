"""memory.predict() of a build() whose weights are read from files, or lie in memory of numpy."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from libraries import library
from steps import assert_same, builder, mlp, tracked
from torch import nn

import memsave_ext as ms


def of_model(make):
    def build():
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.randn(512, 64)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


def language_model(make):
    def build():
        model = make().train()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids = torch.arange(64).reshape(2, 32)

        def step():
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained(dtype, device, tmp_path):
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)

    def loaded():
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)

    from_config = transformers.AutoModelForCausalLM.from_config
    made = language_model(lambda: from_config(config, dtype=dtype))
    expected = ms.memory.predict(made, device=device)
    predicted = ms.memory.predict(language_model(loaded), device=device)
    assert predicted.at_peak == expected.at_peak and expected.at_peak["parameters"] > 0
    assert (predicted.peak, predicted.live) == (expected.peak, expected.live)
    if device == "cpu":
        t = tracked(language_model(loaded))
        assert (predicted.peak, predicted.at_peak) == (t.peak, t.at_peak)


def from_numpy(model, _):
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.from_numpy(np.zeros(param.shape, np.float32))))


def assigned(model, path):
    model.load_state_dict(library("safetensors.torch").load_file(path), assign=True)


def in_a_pool(model, path):
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(library("safetensors.torch").load_file, path).result()
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("load", [from_numpy, assigned, in_a_pool])
@pytest.mark.parametrize("in_backward", [False, True])
def test_weights_that_no_operator_has_made(load, in_backward, tmp_path):
    """Buffers, too, and those that the hooks of an optimizer in backward follow."""
    path = tmp_path / "weights"

    def make():
        model = nn.Sequential(mlp(), nn.BatchNorm1d(64))
        model[1].register_buffer("table", torch.zeros(1000))
        return model

    library("safetensors.torch").save_file(make().state_dict(), path)

    def prepare(_):
        model = make()
        load(model, path)
        return model

    def optimizer(params):
        return ms.AdamW(params, in_backward=in_backward, small_bytes=0)

    predicted, _ = assert_same(builder(optimizer, prepare))
    assert predicted.at_peak == ms.memory.predict(builder(optimizer, lambda _: make())).at_peak
    tensors = [*make().parameters(), *make().buffers()]
    assert predicted.at_peak["parameters"] == sum(tensor.nbytes for tensor in tensors)


def test_weights_that_share_memory():
    def make():
        flat = torch.from_numpy(np.zeros(2 * 64 * 64, np.float32))
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        first.weight = nn.Parameter(flat[: 64 * 64].view(64, 64))
        second.weight = nn.Parameter(flat[64 * 64 :].view(64, 64))
        return nn.Sequential(first, second)

    assert_same(of_model(make))


def in_a_thread(make):
    made = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made[0]


def test_a_model_that_another_thread_has_made():
    assert_same(of_model(lambda: in_a_thread(mlp)))

    def build():
        model, optimizer, step = of_model(lambda: in_a_thread(mlp))()
        return model, ms.in_backward(optimizer), step

    with pytest.raises(RuntimeError, match=r"predict: the parameter 0\.0\.weight has real memory"):
        ms.memory.predict(build)
