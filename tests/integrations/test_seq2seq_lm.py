"""patch_seq2seq_lm beside the plain run of encoders with decoders, or refused when it is called."""

import copy

import pytest
import torch
import torch.nn.functional as F

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.predict.techniques import Techniques

LIBRARIES = ["transformers"]
transformers = None  # conftest.py imports it

COMMON = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 0, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
T5 = {"d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0}
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}  # fmt: skip
KINDS = {
    "t5": T5, "mt5": T5, "umt5": {**T5, "tie_word_embeddings": False},
    "longt5": {**T5, "local_radius": 3},
    "bart": BART, "mbart": BART, "marian": BART, "pegasus": BART, "plbart": BART, "mvp": BART,
    "led": {**BART, "attention_window": 4, "max_encoder_position_embeddings": 32,
            "max_decoder_position_embeddings": 32},
}  # fmt: skip
IN_PYTHON = ["t5", "bart"]
HEAD = Techniques(loss_head=True)
OUTPUTS = ["token_losses", "lse", "predicted_tokens", "token_accuracy"]


def made(kind, **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **KINDS.get(kind, {}), **more})
    return transformers.AutoModelForSeq2SeqLM.from_config(config).double().train()


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (2, 8), generator=generator)
    labels = torch.randint(3, 64, (2, 6), generator=generator)
    labels[0, 4:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def step(model, **more):
    torch.manual_seed(2)
    output = model(**batch(), **more)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS if _native.module is not None else IN_PYTHON)
def test_same_gradients(kind):
    model = made(kind)
    patched = copy.deepcopy(model)
    patch = ms.patch_seq2seq_lm(patched)
    for _ in range(2):  # in the second what is done to logits is known
        for of in (model, patched):
            of.zero_grad()
        (plain, expected), (output, found) = step(model), step(patched)
        assert output.logits is None and type(output) is type(plain)
        assert output.encoder_last_hidden_state.shape == plain.encoder_last_hidden_state.shape
        torch.testing.assert_close(output.loss.double(), plain.loss, rtol=1e-6, atol=0)
        assert found.keys() == expected.keys()
        for name, right in expected.items():
            scale = max(right.abs().max().item(), 1e-3)
            torch.testing.assert_close(found[name], right, rtol=1e-9, atol=1e-9 * scale)
    patch.remove()
    assert step(patched)[0].logits is not None


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_eval_tuples_and_inputs_of_its_own(kind):
    model = made(kind)
    own = {"decoder_input_ids": torch.full((2, 6), 5)}
    expected = [model(**batch()).loss, model(**batch(), **own).loss]
    logits = model.eval()(**batch()).logits
    ms.patch_seq2seq_lm(model)
    assert torch.equal(model(**batch()).logits, logits)
    model.train()
    assert model(input_ids=batch()["input_ids"], **own).logits is not None
    found = [model(**batch()).loss, model(**batch(), **own).loss]
    torch.testing.assert_close([loss.double() for loss in found], expected)
    given = batch()
    output = model(given["input_ids"], given["attention_mask"], labels=given["labels"],
                   return_dict=False)  # fmt: skip
    torch.testing.assert_close(output[0].double(), expected[0])
    assert output[1] is None


def test_z_loss_and_outputs_besides():
    model = made("t5")
    labels = batch()["labels"]
    logits = model(**batch()).logits
    counted, lse = labels != -100, logits.logsumexp(-1)
    losses = F.cross_entropy(logits.mT, labels, reduction="none")
    ms.patch_seq2seq_lm(model, z_loss=0.01, outputs=OUTPUTS)
    output = model(**batch())
    torch.testing.assert_close(
        output.loss.double(), (losses + 0.01 * lse.square())[counted].mean(), rtol=1e-6, atol=0
    )
    accuracy = (logits.argmax(-1) == labels)[counted].float().mean()
    expected = [losses, lse, logits.argmax(-1), accuracy]
    torch.testing.assert_close([output[name] for name in OUTPUTS], expected, check_dtype=False)


def test_a_bias_of_the_logits_is_an_error_in_the_first_step():
    model = made("bart")
    model.final_logits_bias += torch.arange(64)
    ms.patch_seq2seq_lm(model)
    with pytest.raises(RuntimeError, match="BartForConditionalGeneration does more to its logits"):
        step(model)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.once
def test_a_technique_of_fits():
    def build():
        config = transformers.T5Config(**{**COMMON, **T5, "vocab_size": 4000})
        model = transformers.T5ForConditionalGeneration(config).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.ones(4, 64, dtype=torch.long)

        def step():
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    plain, head = (ms.memory.predict(m.applied(build)) for m in (Techniques(), HEAD))
    assert head.peak < 0.7 * plain.peak


def test_models_that_are_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    causal = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with pytest.raises(TypeError, match="is not an encoder with a decoder; use patch_causal_lm"):
        ms.patch_seq2seq_lm(causal)
    with pytest.raises(TypeError, match="adds losses of its router"):
        ms.patch_seq2seq_lm(made("switch_transformers", **T5, num_experts=2))
    with pytest.raises(TypeError, match="in another way than T5 and Bart do"):
        ms.patch_seq2seq_lm(made("m2m_100", **BART))
    with pytest.raises(TypeError, match="has no plain nn.Linear as its output embeddings"):
        ms.patch_seq2seq_lm(torch.nn.Linear(2, 2))
    model = made("t5")
    patch = ms.patch_seq2seq_lm(model)
    with pytest.raises(RuntimeError, match="is patched already"):
        ms.patch_seq2seq_lm(model)
    patch.remove()
    with pytest.raises(ValueError, match="outputs must be names among"):
        ms.patch_seq2seq_lm(model, outputs=["logits"])
    assert step(model)[0].logits is not None


@pytest.mark.skipif(_native.module is None, reason="in pure Python the gradient is whole")
def test_rows_of_a_head_of_its_own_are_stepped(recwarn):
    model = made("t5").float()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    optimizer = ms.AdamW(model.parameters(), lr=1e-2, in_backward=True)
    ms.patch_seq2seq_lm(model, debug=True)
    before = model.lm_head.weight.detach().clone()
    model(**batch()).loss.backward()
    assert model.lm_head.weight.grad is None
    optimizer.step()
    assert not torch.equal(model.lm_head.weight, before)
    assert not [w for w in recwarn if "linear_weight is made as a whole" in str(w.message)]
