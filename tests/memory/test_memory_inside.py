"""What may be done with a model and its optimizer inside of memory.track(), and after it."""

import copy
import gc
import io
import pickle
import random
import threading
import weakref

import pytest
import torch
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.elsewhere.gradient import GradientElsewhere

native_only = pytest.mark.skipif(
    not _native.available, reason="in pure Python one track runs at a time, on its thread"
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "gradients_elsewhere"])
def test_parameters_that_are_no_leaves(elsewhere, monkeypatch):
    """As in replicas of DataParallel: their .grad is not asked for, of which torch would warn."""
    monkeypatch.setattr(GradientElsewhere, "made", elsewhere)  # whether there ever was one
    model, base = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
    model._parameters["weight"] = base * 2
    optimizer = torch.optim.SGD([base, model.bias], lr=0.1)
    with ms.memory.track(model, optimizer) as t:
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    assert t.at_peak["gradients"] > 0


class OwnState(nn.Module):
    """Copies and pickles its attributes itself, unlike torch's modules."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)

    def __getstate__(self):
        return self.__dict__

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), OwnState(), nn.Linear(8, 2))


def built():
    model = net()
    return model, torch.optim.AdamW(model.parameters())


X = torch.randn(4, 8)


def step(model, optimizer):
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def attributes(model):
    """Of each module, all but what it was trained to: hooks and calls of its own."""
    skipped = ("_parameters", "_buffers", "_modules", "training")
    return [
        {k: copy.copy(v) for k, v in module.__dict__.items() if k not in skipped and v is not None}
        for module in model.modules()
    ]


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "torch.save": saved,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_plain(copied):
    """Made inside, they are as those of before, run by themselves, and are not tracked."""
    model, optimizer = built()
    step(model, optimizer)
    plain = attributes(copied(model))
    expected = model(X)
    with ms.memory.track(model, optimizer) as t:
        made, its_optimizer = copied((model, optimizer))
        step(made, its_optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        again = copied(made)
        assert not model(X).any()
    assert t.timeline.step.max() == 0  # what was stepped is another model
    assert attributes(made) == attributes(again) == plain
    assert not its_optimizer._optimizer_step_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in made.parameters())
    assert made(X).any()  # not the original's, which gives zeros
    assert torch.equal(made(X), again(X))
    assert not torch.equal(made(X), expected)  # it was stepped


def test_a_replica_runs_its_own_parameters():
    """DataParallel's replicas have the attributes of the module they are made of."""
    model = nn.Linear(8, 2)
    with ms.memory.track(model) as t:
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.zeros(2, 8), torch.ones(2)
        assert torch.equal(replica(X), torch.ones(4, 2))
    assert t.peak_phase == "forward"
    assert torch.equal(replica(X), torch.ones(4, 2))


def test_nothing_is_kept_alive():
    for inside in (True, False):
        model, optimizer = built()
        parameters = sum(p.nbytes for p in model.parameters())
        seen = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0])
        gc.disable()  # freed at once, as without track
        try:
            with ms.memory.track(model, optimizer) as t:
                step(model, optimizer)
                if inside:
                    del model, optimizer
            if not inside:
                del model, optimizer
        finally:
            gc.enable()
        assert [reference() for reference in seen] == [None] * 3
        assert t.live == (0 if inside else t.timeline.live[-1].sum())
        assert t.at_peak["parameters"] == parameters
        assert {tensor.name for tensor in t.top()} >= {"0.weight", "0.weight exp_avg"}
        text = io.StringIO()
        t.report(file=text)
        assert "0.weight" in text.getvalue()
        with t:
            pass


def test_figures_before_the_block_are_an_error():
    model = net()
    t = ms.memory.track(model)
    assert (t.live, t.peak) == (0, 0)
    for figure in (
        lambda: t.at_peak,
        lambda: t.timeline,
        lambda: t.steps,
        lambda: t.regions,
        t.top,
        t.remedies,
        t.report,
        t.to_json,
        lambda: t.plot("never.png"),
    ):
        with pytest.raises(
            RuntimeError, match="nothing was tracked yet: the figures are known once"
        ):
            figure()
    with t:
        pass
    assert sum(t.at_peak.values()) == t.peak > 0


def test_timelines_are_compared():
    timelines = []
    for size in (10, 20):
        with ms.memory.track() as t:
            kept = torch.empty(size)
        assert kept.numel() == size
        timelines.append(t.timeline)
    first, second = timelines
    assert first == copy.deepcopy(first)
    assert hash(first) == hash(copy.deepcopy(first))
    assert first != second
    assert first != "a timeline"


def test_traced_scripted_and_symbolic():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with ms.memory.track(model) as t:
        made = [
            torch.jit.script(model),
            torch.jit.trace(model, (X,)),
            torch.fx.symbolic_trace(model),
        ]
        made.append(copy.deepcopy(made[-1]))
        pickle.dumps(made[-1])
        assert torch.equal(torch.func.functional_call(model, {}, (X,)), model(X))
    assert t.peak > 0
    for other in made:
        assert torch.equal(other(X), model(X))
    assert not [key for m in model.modules() for key in m.__dict__ if "compiled" in key]


def test_parameters_that_are_replaced():
    model, optimizer = built()
    new = nn.Parameter(torch.zeros(8, 8))
    swapped = nn.Parameter(torch.ones(2, 8))
    with ms.memory.track(model, optimizer) as t:
        step(model, optimizer)
        optimizer.param_groups[0]["params"][0] = model[0].weight = new
        torch.utils.swap_tensors(model[3].weight, swapped)  # no weak references may be there
        step(model, optimizer)
        t.reset_peak()
        step(model, optimizer)
    assert t.at_peak["optimizer"] >= 2 * sum(p.nbytes for p in model.parameters())
    model.to("meta")
    assert t.live > 0


@native_only
def test_nested_on_one_model_and_in_threads():
    model, optimizer = built()
    before = attributes(model)

    def inner(found):
        with ms.memory.track(model) as t:
            model(X)
        found.append(t)

    found = []
    with ms.memory.track(model, optimizer) as outer:
        inner(found)
        threads = [threading.Thread(target=inner, args=(found,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        step(model, optimizer)
    assert len(found) == 7
    assert all("forward" in {PHASES[p] for p in t.timeline.phase.tolist()} for t in found)
    assert len(outer.steps) == 1
    assert attributes(model) == before


PHASES = ms.memory.PHASES


class Stop(BaseException):
    pass


def _raises(model, optimizer):
    hook = model[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(Stop()))
    try:
        with pytest.raises(Stop):
            model(X)
    finally:
        hook.remove()


DONE_INSIDE = {
    "step": step,
    "raise": _raises,
    "save": lambda model, optimizer: saved((model, optimizer)),
    "copy": lambda model, optimizer: step(*copy.deepcopy((model, optimizer))),
    "states": lambda model, optimizer: (
        model.load_state_dict(saved(model.state_dict())),
        optimizer.load_state_dict(saved(optimizer.state_dict())),
    ),
    "share": lambda model, optimizer: model.share_memory(),
    "convert": lambda model, optimizer: model.double().float(),
    "hook": lambda model, optimizer: model[0].register_forward_hook(lambda *_: None).remove(),
    "freeze": lambda model, optimizer: model[0].requires_grad_(not model[0].weight.requires_grad),
    "eval": lambda model, optimizer: model.train(not model.training),
    "parameter hook": lambda model, optimizer: model[3].weight.register_post_accumulate_grad_hook(
        lambda p: None
    ),
}


@pytest.mark.parametrize("seed", range(10))
def test_anything_in_any_order(seed):
    """A model trains in blocks as it does without, and carries nothing out of them."""
    choice = random.Random(seed)
    results = []
    acts = [choice.choice(sorted(DONE_INSIDE)) for _ in range(25)]
    leaves = [choice.random() < 0.3 for _ in acts]
    for tracks in (True, False):
        model, optimizer = built()
        plain = attributes(model)
        t = ms.memory.track(model, optimizer)
        running = False
        for act, leave in zip(acts, leaves, strict=True):
            if tracks and not running:
                t.__enter__()
                running = True
            DONE_INSIDE[act](model, optimizer)
            if running and leave:
                t.__exit__(None, None, None)
                running = False
                assert attributes(model) == plain
        if running:
            t.__exit__(None, None, None)
        assert attributes(model) == plain
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        if tracks:
            assert (t.timeline.live.sum(1) >= 0).all()
            assert len(t.steps) <= 1 + acts.count("step")
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_wrapped_by_distributed_data_parallel(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, optimizer = built()
        with ms.memory.track(model, optimizer) as t:
            replicated = nn.parallel.DistributedDataParallel(model)
            for _ in range(2):
                step(replicated, optimizer)
        plain, its_optimizer = built()
        for _ in range(2):
            step(plain, its_optimizer)
        step(replicated, optimizer)
        step(plain, its_optimizer)
    finally:
        torch.distributed.destroy_process_group()
    assert len(t.steps) == 2
    assert t.at_peak["optimizer"] > 0
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)
