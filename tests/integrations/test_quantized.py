"""LoRA on quantized weights, of bitsandbytes, torchao and as GPTQ has them: predicted, fitted into
budgets, and tracked."""

import gc
import logging

import pytest
import torch
from libraries import library
from sampling import share
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memsave_ext as ms

LIBRARIES = ["transformers", "peft"]
transformers = peft = None  # conftest.py imports them

logging.getLogger("transformers").setLevel(logging.ERROR)
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ADAPTED = ("q_proj", "v_proj", "down_proj")
WORDS, ROWS, TOKENS = 128, 4, 64


def replaced(model, make):
    """Puts what ``make`` returns of it in the place of each linear layer but the head."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            above, _, own = name.rpartition(".")
            setattr(model.get_submodule(above), own, make(module))


def bitsandbytes_4bit(model, **options):
    nn4 = library("bitsandbytes").nn

    def make(linear):
        made = nn4.Linear4bit(linear.in_features, linear.out_features, bias=False)
        made.weight = nn4.Params4bit(linear.weight.data, quant_type="nf4", module=made, **options)
        return made

    replaced(model, make)
    model.to("cpu")  # which quantizes


def bitsandbytes_8bit(model):
    nn8 = library("bitsandbytes").nn

    def make(linear):
        sizes = linear.in_features, linear.out_features
        made = nn8.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
        made.weight = nn8.Int8Params(linear.weight.data, requires_grad=False)
        return made

    replaced(model, make)
    model.to("cpu")


def torchao(name, **options):
    def quantize(model):
        of = library("torchao.quantization")
        if name == "NF4":
            nf4 = library("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
            for module in model.modules():
                if type(module) is nn.Linear and module is not model.lm_head:
                    weight = nf4.to_nf4(module.weight.detach(), 64, 64)
                    module.weight = nn.Parameter(weight, requires_grad=False)
            return
        made = {k: v(of) if callable(v) else v for k, v in options.items()}
        config = getattr(of, name)(**made)
        of.quantize_(model, config, lambda m, at: type(m) is nn.Linear and at != "lm_head")

    return quantize


class Packed(nn.Module):
    """As GPTQ's layers: eight numbers of four bits in each of a buffer's, and scales."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        scales = weight.abs().amax(1, keepdim=True) / 7
        codes = ((weight / scales).round().clamp(-8, 7) + 8).int()
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        packed = (codes.unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)
        for name, buffer in (("qweight", packed), ("scales", scales), ("shifts", shifts)):
            self.register_buffer(name, buffer)
        self.down = nn.Linear(weight.shape[1], 8, bias=False)
        self.up = nn.Linear(8, weight.shape[0], bias=False)

    def forward(self, x):
        codes = (self.qweight.unsqueeze(-1) >> self.shifts & 15) - 8
        return nn.functional.linear(x, codes.flatten(1) * self.scales) + self.up(self.down(x))


QUANTIZED = {
    "Linear4bit": bitsandbytes_4bit,
    "Linear4bit, nested, in bfloat16": lambda model: bitsandbytes_4bit(
        model, compress_statistics=True, quant_storage=torch.bfloat16
    ),
    "Linear8bitLt": bitsandbytes_8bit,
    "int8": torchao("Int8WeightOnlyConfig"),
    "int4": torchao(
        "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=lambda of: of.PerGroup(32)
    ),
    "float8": torchao("Float8WeightOnlyConfig"),
    "NF4": torchao("NF4"),
    "GPTQ": lambda model: replaced(model, Packed),
}


def some_kinds(place):
    return pytest.mark.parametrize("kind", share(QUANTIZED, 3, place))


def made(kind, layers=2):
    """Returns a model with adapters, and its optimizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if kind != "GPTQ":
        model.requires_grad_(False)
    QUANTIZED[kind](model)
    if kind != "GPTQ":
        adapters = peft.LoraConfig(
            r=8, target_modules=list(ADAPTED), init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, adapters)
        # As peft.prepare_model_for_kbit_training() does.
        model.get_input_embeddings().register_forward_hook(lambda _, __, x: x.requires_grad_())
    trained = [p for p in model.parameters() if p.requires_grad]
    return model.train(), torch.optim.AdamW(trained, lr=1e-2)


def batch():
    ids = torch.randint(WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def stepper(model, optimizer):
    inputs = batch()

    def step():
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def tensors():
    """Bytes of all tensors that the garbage collector knows, by their storages."""
    found = {}
    for value in gc.get_objects():
        if torch.Tensor in type(value).__mro__ and type(value).__name__ != "FakeTensor":
            if hasattr(value, "__tensor_flatten__"):
                continue  # it has no memory, and the tensors inside are found
            storage = value.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def built(kind):
    """As made(); returns a function, too, that counts the bytes that live since then."""
    library("bitsandbytes")  # which makes tensors when it is imported
    gc.collect()
    before = tensors()
    model, optimizer = made(kind)

    def held():
        gc.collect()
        return sum(size for key, size in tensors().items() if key not in before)

    return model, optimizer, held


def grown(step):
    """Bytes that a step needs at most beside what there was before, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    found = (e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]")
    live = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@some_kinds(0)
def test_predicted_beside_torchs_profiler(kind):
    predicted = ms.memory.predict(*made(kind), batch())
    peak, at_peak = predicted.peak, predicted.at_peak
    del predicted
    model, optimizer, held = built(kind)
    step = stepper(model, optimizer)
    step()
    assert peak == pytest.approx(held() + grown(step), rel=0.02)
    if ms._native.available:
        with ms.memory.track(model, optimizer) as t:
            step()
        assert peak == pytest.approx(t.peak, rel=1e-3)
        for category in ("parameters", "optimizer", "activations"):
            assert at_peak[category] == pytest.approx(t.at_peak[category], rel=0.02)


@some_kinds(1)
def test_what_is_held_has_the_scales(kind):
    """And nothing of the size that a quantized weight pretends to have."""
    model, optimizer, held = built(kind)
    now = ms.memory.footprint(model, optimizer).now
    assert now.bytes == pytest.approx(held(), rel=0.01)
    on_cpu, on_cuda = (
        ms.memory.predict(model, optimizer, batch(), device=device) for device in ("cpu", "cuda")
    )
    # Sizes are rounded up there, to 512 bytes, and batches count.
    assert on_cpu.peak < on_cuda.peak < 1.05 * on_cpu.peak


def run_of(model, optimizer):
    """Returns the losses of three steps, and the trained weights."""
    step = stepper(model, optimizer)
    losses = [step() for _ in range(3)]
    return losses, [p.detach().clone() for p in model.parameters() if p.requires_grad]


@some_kinds(2)
def test_a_technique_trains_the_same(kind):
    plain, weights = run_of(*made(kind))
    model, optimizer = made(kind)
    by_block = {"budget": "1GB", "technique": "checkpoint by block", "verbose": False}
    fitted = ms.fit(model, optimizer, batch(), **by_block)
    losses, trained = run_of(model, optimizer)
    assert losses == plain and all(map(torch.equal, trained, weights))
    if ms._native.available:
        assert fitted.measured == pytest.approx(fitted.predicted, rel=0.02)
    fitted.undo()


@pytest.mark.usefixtures("few_techniques")
@pytest.mark.skipif(not ms._native.available, reason="a measured peak is the native part's")
def test_the_least_cost_within_half_of_what_it_needs():
    plain, weights = run_of(*made("Linear4bit", layers=4))
    model, optimizer = made("Linear4bit", layers=4)
    half = ms.memory.predict(model, optimizer, batch()).peak // 2
    fitted = ms.fit(model, optimizer, batch(), budget=half, verbose=False)
    assert fitted.technique != "as built" and fitted.predicted <= half
    losses, trained = run_of(model, optimizer)
    assert losses == plain and all(map(torch.equal, trained, weights))
    assert fitted.measured <= 1.02 * half


def gradients(model, loss):
    loss.backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.skipif(not ms._native.available, reason="budgets need the native part")
@pytest.mark.each_value
@pytest.mark.parametrize("whole", [True, False], ids=["remat_module", "remat"])
@some_kinds(0)
def test_budgets_from_the_first_step(kind, whole):
    model, optimizer = made(kind)
    expected = gradients(model, model(**batch()).loss)
    model, optimizer = made(kind)
    needed = ms.memory.predict(model, optimizer, batch()).peak
    ms._native.module.remat_forget()
    if whole:
        block = ms.remat_module(model, budget=int(0.7 * needed))
    with ms.memory.track(model) as t:
        if whole:
            loss = model(**batch()).loss
        else:
            block = ms.remat(model=model, budget=int(0.7 * needed))
            with block:
                loss = model(**batch()).loss
        actual = gradients(model, loss)
    assert all(map(torch.equal, actual, expected))
    figures = block.figures()
    assert sum(row.bytes for row in figures.saved if row.verdict == "dropped") > 0
    if whole:
        assert "has no plan yet" not in block.report()
        assert t.peak <= 1.02 * max(0.7 * needed, block.least or 0)


@pytest.mark.parametrize("kind", ["Linear4bit", "int8"])
def test_the_trainers_callback(kind, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in batch()["input_ids"]]
    trained = []
    for fit in (None, ms.integrations.transformers.Fit("auto", technique="checkpoint by block")):
        model, _ = made(kind)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=ROWS, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", max_grad_norm=0,
        )  # fmt: skip
        callbacks = [] if fit is None else [fit]
        transformers.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
        trained.append([p.detach().clone() for p in model.parameters() if p.requires_grad])
    assert fit.fitted.technique == "checkpoint by block"
    if ms._native.available:
        assert fit.fitted.measured == pytest.approx(fit.fitted.predicted, rel=0.02)
    assert all(map(torch.equal, *trained))


@pytest.mark.skipif(not ms._native.available, reason="a track in pure Python sees less")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW32bit", "Lion8bit"])
def test_what_bitsandbytes_optimizers_make_inside(name):
    kind = getattr(library("bitsandbytes").optim, name)

    def build():
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(3)])
        optimizer, x = kind(model.parameters(), lr=1e-3), torch.randn(8, 128)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    model, optimizer, step = build()
    step()
    with ms.memory.track(model, optimizer) as t:
        step()
    assert t.peak_phase == "optimizer"
    assert ms.memory.predict(build).peak == pytest.approx(t.peak, rel=1e-3)
