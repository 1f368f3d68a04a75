"""patch_causal_lm: losses and gradients of Hugging Face's models, without their logits."""

import copy
import logging
import pickle
import types

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, run_threads

import memsave_ext as ms
from memsave_ext import _native

LIBRARIES = ["transformers", "accelerate"]
transformers = None  # conftest.py imports it

logging.getLogger("transformers").setLevel(logging.ERROR)


def gpt2():
    """Its head's weight is that of its embedding."""
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def small(**more):
    return {
        "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, **more,
    }  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small()))


def gemma2():
    """Its logits are capped."""
    config = transformers.Gemma2Config(**small(head_dim=8, final_logit_softcapping=2.0))
    return transformers.Gemma2ForCausalLM(config)


def granite():
    """Its logits are scaled."""
    config = transformers.GraniteConfig(**small(logits_scaling=2.0))
    return transformers.GraniteForCausalLM(config)


MODELS = [gpt2, llama, gemma2, granite]
every_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def made(make):
    torch.manual_seed(0)
    model = make()
    return model.train()


def batch(number=1):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(300, (3, 8), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def no_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def gradients(model, **arguments):
    model.zero_grad()
    output = model(**arguments)
    output.loss.backward()
    return output, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.each_value
@every_model
@pytest.mark.parametrize(
    "options",
    [{}, {"num_items_in_batch": 40}, {"num_items_in_batch": torch.tensor(40)}, {"shift": True}],
    ids=["mean", "items", "items on a device", "shifted"],
)
def test_same_loss_and_gradients_without_logits(make, options):
    model = no_dropout(made(make))
    arguments = {**batch(), **options}
    if arguments.pop("shift", False):
        arguments["shift_labels"] = torch.roll(arguments["labels"], -2, 1)
    expected, expected_grads = gradients(model, **arguments)
    patch = ms.patch_causal_lm(model)
    found, found_grads = gradients(model, **arguments)
    assert found.logits is None and "logits" not in found
    assert expected.logits is not None and type(found) is type(expected)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found_grads, expected_grads, rtol=1e-4, atol=1e-6)
    patch.remove()
    again, again_grads = gradients(model, **arguments)
    assert_equal([again.loss, again.logits, *again_grads],
                 [expected.loss, expected.logits, *expected_grads])  # fmt: skip


@every_model
def test_logits_without_labels_and_in_eval(make):
    model = made(make)
    expected = copy.deepcopy(model)
    ms.patch_causal_lm(model)
    ids = batch()["input_ids"]
    for other in (model, expected):
        torch.manual_seed(3)
        other.seen = other(input_ids=ids).logits
    assert_equal([model.seen], [expected.seen])
    model.eval(), expected.eval()
    found, right = model(**batch()), expected(**batch())
    assert_equal([found.loss, found.logits], [right.loss, right.logits])
    generated = model.generate(ids[:, :4], max_new_tokens=2, do_sample=False)
    assert generated.shape == (3, 6)


@every_model
def test_tuples_and_positions(make):
    model = no_dropout(made(make))
    expected = model(**batch()).loss
    ms.patch_causal_lm(model)
    for _ in range(2):
        output = model(**batch(), return_dict=False)
        torch.testing.assert_close(output[0], expected)
        assert output[1] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_16_bits(dtype):
    """The loss is a float32, as theirs."""
    model = no_dropout(made(llama)).to(dtype)
    expected, expected_grads = gradients(model, **batch())
    ms.patch_causal_lm(model)
    found, found_grads = gradients(model, **batch())
    assert found.loss.dtype == expected.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found_grads, expected_grads, rtol=0.05, atol=1e-2)


def test_models_that_are_refused():
    with pytest.raises(TypeError, match="has no plain nn.Linear as its output embeddings"):
        ms.patch_causal_lm(torch.nn.Linear(2, 2))
    config = transformers.BertConfig(**small())
    with pytest.raises(TypeError, match="does not use ForCausalLMLoss|has no plain nn.Linear"):
        ms.patch_causal_lm(transformers.BertForSequenceClassification(config))
    model = made(llama)
    patch = ms.patch_causal_lm(model)
    with pytest.raises(RuntimeError, match="is patched already"):
        ms.patch_causal_lm(model)
    patch.remove()
    ms.patch_causal_lm(model).remove()
    head = model.lm_head
    head.forward = own = lambda x: torch.nn.functional.linear(3 * x, head.weight)
    with pytest.raises(TypeError, match="has output embeddings with a forward of their own"):
        ms.patch_causal_lm(model)
    assert head.forward is own
    head.forward = types.MethodType(type(head).forward, head)  # as accelerate's hooks leave it
    ms.patch_causal_lm(model).remove()


def test_an_interrupted_forward_leaves_no_trace():
    """torch calls no hook after a forward that Ctrl-C ends."""
    model = made(llama)
    ms.patch_causal_lm(model)

    def interrupted(*_):
        raise KeyboardInterrupt

    for part in (model.model, model.lm_head):
        hook = part.register_forward_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.train()(**batch())
        hook.remove()
        with torch.no_grad():
            assert model.eval()(input_ids=batch()["input_ids"]).logits is not None


def test_a_second_remove_does_nothing():
    model = made(llama)
    first = ms.patch_causal_lm(model)
    first.remove()
    ms.patch_causal_lm(model)
    first.remove()
    assert model.train()(**batch()).logits is None


def test_a_forward_that_raises_leaves_no_trace():
    model = made(llama)
    ms.patch_causal_lm(model)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 4), 10_000), labels=torch.zeros(1, 4, dtype=torch.long))
    assert model(input_ids=batch()["input_ids"]).logits.shape == (3, 8, 300)


OUTPUTS = [
    "token_losses", "log_probs", "entropy", "lse", "mean_logits", "predicted_tokens",
    "token_accuracy",
]  # fmt: skip


def by_logits(model):
    """Returns the outputs, and the mean of losses with a z-loss of 0.01, from the plain logits."""
    logits = model(input_ids=batch()["input_ids"]).logits.float()
    target = F.pad(batch()["labels"], (0, 1), value=-100)[:, 1:]
    counted, lse = target != -100, logits.logsumexp(-1)
    losses = F.cross_entropy(logits.mT, target, reduction="none")
    log_p = logits.log_softmax(-1)
    entropy = torch.where(counted, -(log_p.exp() * log_p).sum(-1), 0.0)
    mean = torch.where(counted, logits.detach().mean(-1), 0.0)
    predicted = logits.argmax(-1)
    accuracy = (predicted == target)[counted].float().mean()
    loss = (losses + 0.01 * lse.square())[counted].mean()
    return loss, [losses, -losses, entropy, lse, mean, predicted, accuracy]


@every_model
def test_z_loss_and_outputs_besides(make):
    model = no_dropout(made(make))
    weights = torch.rand(4, 3, 8)

    def all_gradients(loss, outputs):
        assert [output.requires_grad for output in outputs] == 4 * [True] + 3 * [False]
        total = loss + (torch.stack(outputs[:4]) * weights).sum()
        return torch.autograd.grad(total, list(model.parameters()), allow_unused=True)

    expected, right = by_logits(model)
    expected_grads = all_gradients(expected, right)
    patch = ms.patch_causal_lm(model, z_loss=0.01, outputs=OUTPUTS)
    output = model(**batch())
    found = [output[name] for name in OUTPUTS]
    assert output.logits is None and output.lse is output["lse"]
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    grads = all_gradients(output.loss, found)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-5)
    assert not {*OUTPUTS} & {*model(input_ids=batch()["input_ids"])}
    with pytest.raises(RuntimeError, match="returns a tuple, to which outputs= cannot add"):
        model(**batch(), return_dict=False)
    patch.remove()
    items = ms.patch_causal_lm(model, z_loss=0.01)
    counted = (F.pad(batch()["labels"], (0, 1), value=-100)[:, 1:] != -100).sum()
    loss = model(**batch(), num_items_in_batch=40).loss
    torch.testing.assert_close(loss, expected * counted / 40)
    items.remove()


def test_outputs_of_16_bits_and_under_autocast_are_float32():
    model = no_dropout(made(llama))
    _, right = by_logits(model)
    ms.patch_causal_lm(model, outputs="token_losses")
    with torch.autocast("cpu", torch.bfloat16):
        found = [model(**batch())]
    found.append(model.bfloat16()(**batch()))
    for output in found:
        assert output.loss.dtype == output.token_losses.dtype == torch.float32
        torch.testing.assert_close(output.token_losses, right[0], rtol=0.02, atol=0.02)


def test_outputs_in_a_trainer_that_logs_them(tmp_path):
    """Under accelerate's mixed precision, which makes outputs anew."""
    seen = []

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **options):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
            seen.append((outputs["token_accuracy"], outputs.lse.dtype, outputs.token_losses.shape))
            return (loss, outputs) if return_outputs else loss

    model = made(llama)
    ms.patch_causal_lm(model, z_loss=1e-4, outputs=OUTPUTS)
    rows = [{"input_ids": row, "labels": row} for row in batch()["input_ids"]]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, bf16=True,
        save_strategy="no", per_device_train_batch_size=3, max_steps=2,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows).train()
    assert [(dtype, tuple(shape)) for _, dtype, shape in seen] == 2 * [(torch.float32, (3, 8))]
    assert all(0 <= accuracy <= 1 for accuracy, _, _ in seen)


def test_wrong_options():
    model = made(llama)
    with pytest.raises(ValueError, match="outputs must be names among token_losses.*got 'logits'"):
        ms.patch_causal_lm(model, outputs=["lse", "logits"])
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="z_loss must be a finite number of at least 0"):
            ms.patch_causal_lm(model, z_loss=wrong)
    with pytest.raises(ValueError, match="chunk_size must be a positive multiple of 256 or None"):
        ms.patch_causal_lm(model, chunk_size=100)
    assert model(**batch()).logits is not None


@every_model
def test_labels_that_are_all_ignored(make):
    model = no_dropout(made(make))
    ids = batch()["input_ids"]
    arguments = {"input_ids": ids, "labels": torch.full_like(ids, -100), "num_items_in_batch": 8}
    patched = copy.deepcopy(model)
    ms.patch_causal_lm(patched)
    (expected, expected_grads), (found, found_grads) = (
        gradients(of, **arguments) for of in (model, patched)
    )
    assert_equal([found.loss, *found_grads], [expected.loss, *expected_grads])
    assert found.loss == 0 and patched(input_ids=ids, labels=arguments["labels"]).loss.isnan()


def test_saved_and_pickled(tmp_path):
    model = no_dropout(made(granite))
    ms.patch_causal_lm(model)
    expected = model(**batch()).loss
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    assert loaded(**batch()).logits is not None
    pickled = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = pickled(**batch())
    assert found.logits is None
    assert_equal([found.loss], [expected])


def test_threads():
    model = no_dropout(made(granite))
    expected = model(**batch()).loss
    ms.patch_causal_lm(model)

    def work(number):
        for _ in range(3):
            labels = {} if number % 2 else {"labels": batch()["labels"]}
            output = model(input_ids=batch()["input_ids"], **labels)
            if number % 2:
                assert output.logits.shape == (3, 8, 300)
            else:
                torch.testing.assert_close(output.loss, expected)

    run_threads(work, 4)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_replicas_use_their_own_heads(make, replicate_on_cpu):
    """As under DataParallel, where the model's head is on another device."""
    model = no_dropout(made(make))
    expected, expected_grads = gradients(model, **batch())
    ms.patch_causal_lm(model)
    model.zero_grad()
    replicas = replicate_on_cpu(model, 2)
    heads = [replica.get_output_embeddings().weight for replica in replicas]
    for head in heads:
        head.retain_grad()
    outputs = [replica(**batch()) for replica in replicas]
    sum(output.loss for output in outputs).backward()
    assert all(output.logits is None for output in outputs)
    assert all(head.grad.abs().sum() > 0 for head in heads)
    for output in outputs:
        torch.testing.assert_close(output.loss, expected.loss)
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, [2 * g for g in expected_grads], rtol=1e-4, atol=1e-6)
    replicas = [replica.eval() for replica in replicate_on_cpu(model, 2)]
    with torch.no_grad():
        replicas[1].get_output_embeddings().weight.zero_()
    logits = [replica(**batch()).logits for replica in replicas]
    assert logits[0].any() and not logits[1].any()


def test_copies_are_patched_by_themselves():
    model = no_dropout(made(llama))
    ms.patch_causal_lm(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert not torch.equal(model(**batch()).loss, other(**batch()).loss)


@pytest.mark.parametrize("make", [gpt2, llama], ids=["tied", "not tied"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_trained_with_steps_in_backward(make, checkpointing):
    results = []
    for patched in (False, True):
        model = no_dropout(made(make))
        optimizer = ms.AdamW(model.parameters(), lr=1e-2, in_backward=True)
        if patched:
            ms.patch_causal_lm(model, chunk_size=256)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = []
        for step in range(4):
            loss = model(**batch(step)).loss
            loss.backward()
            head = model.get_output_embeddings().weight
            assert head.grad is None
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, optimizer.state[head]["step"].item()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    assert results[0][1] == results[1][1] == 4


@pytest.mark.skipif(_native.module is None, reason="in pure Python the gradient is whole")
def test_rows_of_a_head_of_its_own_are_stepped(recwarn):
    model = no_dropout(made(llama))
    optimizer = ms.AdamW(model.parameters(), lr=1e-2, in_backward=True)
    ms.patch_causal_lm(model, debug=True)
    model(**batch()).loss.backward()
    optimizer.step()
    assert not [w for w in recwarn if "linear_weight is made as a whole" in str(w.message)]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(tmp_path, micro_batches, bf16):
    rows = [{"input_ids": row, "labels": row} for row in batch()["input_ids"].repeat(4, 1)]
    results = []
    for patched in (False, True):
        model = no_dropout(made(llama))
        optimizer = ms.AdamW(model.parameters(), lr=1e-2, in_backward=True)
        if patched:
            ms.patch_causal_lm(model)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
            save_strategy="no", logging_steps=1, per_device_train_batch_size=2, max_steps=3,
            max_grad_norm=0, gradient_accumulation_steps=micro_batches, bf16=bf16,
            eval_strategy="steps", eval_steps=3,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:4],
            optimizers=(optimizer, schedule),
        )  # fmt: skip
        optimizer.accumulate_when(lambda trainer=trainer: not trainer.accelerator.sync_gradients)
        trainer.train()
        logs = trainer.state.log_history
        results.append([log.get("loss", log.get("eval_loss")) for log in logs[:-1]])
        assert trainer.predict(rows[:2]).predictions.shape == (2, 8, 300)
    assert len(results[0]) == 4
    assert results[1] == pytest.approx(results[0], rel=2e-2 if bf16 else 1e-4)


@pytest.mark.once
def test_fits_tries_the_head():
    def llama():
        sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 4000}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = transformers.LlamaConfig(**sizes, **heads)
        model = transformers.LlamaForCausalLM(config).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.ones(4, 128, dtype=torch.long)

        def step():
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    budget = int(0.7 * ms.memory.predict(llama).peak)
    found = ms.memory.fits(llama, budget, device="cpu")
    assert found.cheapest.name == "loss head in chunks"
