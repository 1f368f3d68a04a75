"""peft's adapters of all kinds: predicted, and trained with the plain run's bits."""

import logging

import pytest
import torch
import torch.nn.functional as F

import memsave_ext as ms

LIBRARIES = ["transformers", "peft"]
transformers = peft = None  # conftest.py imports them

logging.getLogger("transformers").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]
WORDS = 128


def several(model):
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["k_proj"]))
    model.base_model.set_adapter(["default", "second"])


def merged(model):
    """The first one is in the weights, and the second one is trained."""
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))
    model.merge_adapter(["default"])
    model.set_adapter("second")


ADAPTERS = {  # options of LoraConfig, and what is done with the model
    "LoRA": ({}, None),
    "DoRA": ({"use_dora": True}, None),
    "rsLoRA": ({"use_rslora": True}, None),
    "dropout": ({"lora_dropout": 0.1}, None),
    "modules to save": ({"modules_to_save": ["lm_head", "embed_tokens"]}, None),
    "on embeddings": ({"target_modules": [*PROJECTIONS, "embed_tokens"]}, None),
    "on the head": ({"target_modules": [*PROJECTIONS, "lm_head"]}, None),
    "several": ({}, several),
    "merged": ({}, merged),
}
EACH = pytest.mark.parametrize("kind", ADAPTERS)


def made(kind):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1, use_cache=False,
    )  # fmt: skip
    options, then = ADAPTERS[kind]
    defaults = {"target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    model = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, **(defaults | options)))
    if then is not None:
        then(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model.train(), torch.optim.AdamW(trained, lr=1e-2)


def batch():
    ids = torch.randint(1, WORDS, (4, 64), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def plain_loss(model, inputs):
    return model(**inputs).loss


def preferences(model, inputs):
    """DPO's loss, with the model without its adapters as the reference."""

    def log_p():
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        own = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])
        return own.squeeze(-1).sum(-1)

    with torch.no_grad(), model.disable_adapter():
        reference = log_p()
    chosen, rejected = (log_p() - reference).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


LOSSES = {"of tokens": plain_loss, "of preferences": preferences}


def run(model, optimizer, loss_of, steps=3):
    torch.manual_seed(5)
    inputs, losses = batch(), []
    for _ in range(steps):
        loss = loss_of(model, inputs)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters() if p.requires_grad]


def building(kind, loss_of):
    def build():
        model, optimizer = made(kind)
        inputs = batch()

        def step():
            loss_of(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


@pytest.mark.each_value
@pytest.mark.once
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@EACH
def test_predicted_peaks(kind, loss_of):
    build = building(kind, loss_of)
    model, optimizer, step = build()
    step()
    with ms.memory.track(model, optimizer) as t:
        step()
    predicted = ms.memory.predict(build)
    assert predicted.peak == pytest.approx(t.peak, rel=0.02)
    assert predicted.at_peak["parameters"] == t.at_peak["parameters"]


def by_block(model):
    ms.checkpoint_modules(model, type(model.get_base_model().model.layers[0]))


def by_remat(model):
    ms.remat_module(model, budget=0.3)


WAYS = {"checkpoint": by_block, "remat": by_remat}


@pytest.mark.once
@pytest.mark.each_value
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("way", WAYS)
@EACH
def test_the_plain_runs_bits(kind, way, loss_of):
    if way == "remat" and not ms._native.available:
        pytest.skip("budgets need the native part")
    losses, weights = run(*made(kind), loss_of)
    model, optimizer = made(kind)
    with ms.memory.track(model, optimizer) as plain:
        run(model, optimizer, loss_of)
    model, optimizer = made(kind)
    WAYS[way](model)
    with ms.memory.track(model, optimizer) as t:
        found, trained = run(model, optimizer, loss_of)
    assert found == losses and all(map(torch.equal, trained, weights))
    if ms._native.available:
        assert t.peak < 0.9 * plain.peak
    assert losses[0] != losses[-1]


def test_a_reference_model_of_its_own():
    """Its parameters count as another model's."""
    torch.manual_seed(3)
    reference, _ = made("LoRA")
    reference = reference.get_base_model().requires_grad_(False).eval()

    def loss_of(model, inputs):
        with torch.no_grad():
            before = reference(input_ids=inputs["input_ids"]).logits
        after = model(input_ids=inputs["input_ids"]).logits
        return F.kl_div(after.log_softmax(-1), before.softmax(-1))

    model, optimizer = made("LoRA")
    inputs = batch()
    predicted = ms.memory.predict(model, optimizer, inputs, loss=lambda out: out.loss)
    assert predicted.others == 0

    def build():
        def step():
            loss_of(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    predicted = ms.memory.predict(build)
    build()[2]()
    with ms.memory.track(model, optimizer) as t:
        build()[2]()
    size = sum(p.nbytes for p in reference.parameters())
    assert predicted.others == pytest.approx(size, rel=0.01)
    assert predicted.peak - predicted.others == pytest.approx(t.peak, rel=0.02)
