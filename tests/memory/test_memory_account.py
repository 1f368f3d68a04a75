"""What memory.track() says memory is made of, against sizes computed by hand."""

import gc
import io
import threading
import time

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.memory import CATEGORIES, PHASES

N, BATCH, LAYERS = 96, 64, 4  # outputs large enough for a recompute to stop early
WEIGHT = N * N * 4
OUTPUT = BATCH * N * 4

native_only = pytest.mark.skipif(not _native.available, reason="known at the end in pure Python")


def mlp(layers=LAYERS):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(N, N, bias=False) for _ in range(layers)])


def column(track, category):
    return track.timeline.live[:, CATEGORIES.index(category)]


def rows_of(track, phase):
    return track.timeline.phase == PHASES.index(phase)


def train(model, optimizer, steps=2, forward=None, **options):
    """Steps whose activations are the layers' outputs: grad of the output is given."""
    x, grad = torch.randn(BATCH, N), torch.randn(BATCH, N)

    def step():
        # A function: nothing of a step lives on in a variable.
        (forward or model)(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    with ms.memory.track(model, optimizer, **options) as t:
        for _ in range(steps):
            step()
    return t


def check_sums(track):
    live = track.timeline.live
    assert (live >= 0).all()
    assert int(live.sum(1).max()) == track.peak
    assert sum(track.at_peak.values()) == track.peak
    assert set(track.at_peak) == set(CATEGORIES)
    assert int(live[-1].sum()) == track.live
    assert (track.timeline.time.diff() >= 0).all()
    assert (track.timeline.step.diff() >= 0).all()


def test_an_ordinary_loop_by_hand():
    model = mlp()
    t = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False))
    check_sums(t)
    assert column(t, "parameters").eq(LAYERS * WEIGHT).all()
    assert column(t, "gradients").max() == LAYERS * WEIGHT
    assert column(t, "gradients")[-1] == 0
    assert column(t, "optimizer")[-1] == LAYERS * WEIGHT
    assert column(t, "activations").max() == LAYERS * OUTPUT
    assert column(t, "activations")[-1] == 0
    # A gradient and its input's beside those of the next layer; the optimizer's intermediates.
    assert column(t, "other").max() <= max(2 * OUTPUT + WEIGHT, 2 * WEIGHT)
    assert t.live == 2 * LAYERS * WEIGHT
    # Activations are all there when backward begins, in the second step beside the states.
    begin = int(rows_of(t, "backward").nonzero()[0])
    assert column(t, "activations")[begin] == LAYERS * OUTPUT
    assert [s.index for s in t.steps] == [0, 1]
    assert max(s.peak for s in t.steps) == t.peak == t.steps[t.peak_step].peak
    assert all(s.seconds > 0 for s in t.steps)


def test_adam_in_backward_by_hand():
    model = mlp()
    optimizer = ms.AdamW(model.parameters(), in_backward=True)
    t = train(model, optimizer)
    check_sums(t)
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values())
    assert state == 2 * LAYERS * WEIGHT + 4 * LAYERS
    assert column(t, "optimizer")[-1] == state
    assert column(t, "gradients").max() >= WEIGHT
    assert column(t, "gradients")[-1] == 0
    assert t.live == LAYERS * WEIGHT + state
    assert t.peak_phase == "backward"


def test_gradients_from_before_are_seen_to_end():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(BATCH, N)).sum().backward()
    with ms.memory.track(model, optimizer) as t:
        first = t.live
        optimizer.zero_grad()
        assert t.live == LAYERS * WEIGHT or not _native.available
    assert first in (2 * LAYERS * WEIGHT, 0 if not _native.available else -1)
    assert t.live == LAYERS * WEIGHT
    check_sums(t)


@native_only
def test_states_from_before_that_are_freed_are_not_in_a_later_peak():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(BATCH, N)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with ms.memory.track(model, optimizer) as t:
        optimizer.state.clear()
        others = torch.empty(2 * LAYERS, N, N)
        del others
    check_sums(t)
    assert t.peak == 3 * LAYERS * WEIGHT + 4 * LAYERS  # the counters of steps are four bytes each


def test_gradients_from_before_end_before_backward():
    """Their addresses may be given to others, which must not be taken for them."""
    model = mlp(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(BATCH, N)

    def step():
        out = model(x).sum()
        optimizer.zero_grad()
        out.backward()
        optimizer.step()

    step()
    for _ in range(3):
        with ms.memory.track(model, optimizer) as t:
            step()
        check_sums(t)
        assert t.live == 2 * 8 * WEIGHT
        assert column(t, "gradients")[-1] == 8 * WEIGHT
        if _native.available:
            # Between forward and backward there are none.
            assert column(t, "gradients")[rows_of(t, "backward")].min() <= WEIGHT


@native_only
def test_every_point_equals_the_allocators_own_reports():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    base = sum(v.nbytes for v in model.state_dict().values())
    with ms.memory.track(model, optimizer) as t, profiler:
        for _ in range(2):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def walk(events):
        for event in events:
            yield event
            yield from walk(event.children)

    events = [
        (event.start_time_ns, event.extra_fields.alloc_size)
        for event in walk(profiler.kineto_results.experimental_event_tree())
        if event.tag == _EventType.Allocation
    ]
    reported = torch.tensor([size for _, size in sorted(events, key=lambda e: e[0])]).cumsum(0)
    ours = t.timeline.live.sum(1) - base
    # What hooks allocate is theirs to report; they make none here. Some rows mark phases only.
    assert torch.equal(ours[1:][ours.diff() != 0], reported)


@pytest.mark.parametrize("kind", ["ours", "explicit", "torch", "torch reentrant"])
def test_checkpointed_regions(kind):
    model = nn.ModuleList([nn.Sequential(*mlp(3)) for _ in range(2)])
    x = torch.randn(BATCH, N, requires_grad=True)

    def region(block, x):
        if kind == "ours":
            return ms.checkpoint(block, x)
        if kind == "explicit":
            return ms.CheckpointFunction.apply(block, 1, x, *block.parameters())
        return torch_checkpoint(block, x, use_reentrant=kind == "torch reentrant")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model

        def forward(self, x):
            for block in self.blocks:
                x = region(block, x)
            return x

    whole = Model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    grad = torch.randn(BATCH, N)
    with ms.memory.track(whole, optimizer) as t:
        for _ in range(2):
            whole(x).backward(grad)
            optimizer.step()
    check_sums(t)
    assert {r.name for r in t.regions} == {"blocks.0", "blocks.1"}
    for r in t.regions:
        assert r.calls == 2
        assert r.seconds > 0
        # The outputs of two layers, and of the third where the recompute does not stop before it.
        early = kind in ("ours", "torch")
        assert r.saved_bytes == (2 if early else 3) * OUTPUT
    # What lives when backward begins: the regions' outputs, and the random state each began with.
    forward_end = int((rows_of(t, "backward") | rows_of(t, "recompute")).nonzero()[0]) - 1
    states = column(t, "activations")[forward_end] - 2 * OUTPUT
    assert states in (0, 2 * torch.get_rng_state().nbytes)
    assert rows_of(t, "recompute").any()


def test_a_region_of_several_modules_has_the_name_of_what_holds_them():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = mlp(2)

        def forward(self, x):
            # The recompute stops before it would enter b.
            return ms.checkpoint(lambda x: self.b(self.a(x).square()), x)

    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(BATCH, N)
    with ms.memory.track(model) as t:
        model(x).sum().backward()
    assert {r.name for r in t.regions} == {"0", "1"}


def test_phases():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, N)
    with ms.memory.track(model, optimizer) as t:
        batch = x * 2
        loss = model(batch).square().sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        del batch, loss, norm
    phases = [PHASES[p] for p in t.timeline.phase.unique_consecutive().tolist()]
    # The root gradient is made before backward begins and the loss is freed after it.
    assert phases == ["other", "forward", "backward", "other", "optimizer", "other"]


def test_a_closure_and_no_optimizer():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)
    x = torch.randn(BATCH, N)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with ms.memory.track(model, optimizer) as t:
        optimizer.step(closure)
    check_sums(t)
    assert all(rows_of(t, phase).any() for phase in ("forward", "backward", "optimizer"))
    assert column(t, "activations").max() >= LAYERS * OUTPUT
    with ms.memory.track(model) as t:
        for _ in range(3):
            model(x).sum().backward()
    assert [s.index for s in t.steps] == [0, 1, 2]


def test_two_optimizers_and_accumulated_gradients():
    """A step ends with the last optimizer's, however many backwards there were."""
    model = mlp()
    optimizers = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]
    x = torch.randn(BATCH, N)
    with ms.memory.track(model, optimizers) as t:
        for _ in range(2):
            for _ in range(3):
                model(x).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    check_sums(t)
    assert [s.index for s in t.steps] == [0, 1]
    assert column(t, "optimizer")[-1] == LAYERS * WEIGHT
    assert column(t, "gradients")[-1] == LAYERS * WEIGHT


class StepsByItsBase(torch.optim.AdamW):
    """Its step calls that of its base class, around which torch calls all step hooks, too, once
    there has been an optimizer of that class."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.average = torch.zeros(8, LAYERS * N, N)
        self.average = None
        return loss


def test_a_step_that_calls_that_of_its_base_class_is_one_step():
    torch.optim.AdamW(mlp().parameters())
    t = train(model := mlp(), StepsByItsBase(model.parameters()), steps=3)
    check_sums(t)
    assert [s.index for s in t.steps] == [0, 1, 2]
    assert t.peak_phase == "optimizer" and t.peak > 8 * LAYERS * WEIGHT


def test_the_largest_tensors_and_who_made_them():
    model = nn.Sequential()
    model.add_module("small", nn.Linear(N, N, bias=False))
    model.add_module("wide", nn.Linear(N, 50 * N, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    t = train(model, optimizer, forward=lambda x: model(x)[:, :N], stacks=True)
    top = t.top(3)
    assert [block.bytes for block in top] == sorted((b.bytes for b in top), reverse=True)
    assert {"wide.weight"} <= {block.name for block in t.top(4)}
    named = {(b.name, b.category) for b in t.top(1000)}
    assert ("small.weight", "parameters") in named
    assert {("wide.weight exp_avg", "optimizer"), ("wide.weight exp_avg_sq", "optimizer")} <= named
    assert t.top(0) == []
    with pytest.raises(ValueError, match="n must not be negative, got -1"):
        t.top(-1)


@pytest.mark.skipif(not _native.available, reason="torch's profiler records no stacks")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_stacks_name_the_line_and_the_operator(checkpointed):
    model = nn.Sequential(nn.Linear(N, 50 * N), nn.GELU(), nn.Linear(50 * N, N))
    x = torch.randn(BATCH, N, requires_grad=True)
    with ms.memory.track(model, stacks=True) as t:
        forward = ms.checkpoint(model, x) if checkpointed else model(x)
        (forward * torch.zeros(50, 1, 1)).sum().backward()
    phase = "recompute" if checkpointed else "forward"
    made = {b.module: b for b in t.top(1000) if b.category == "activations" and b.phase == phase}
    assert [made[name].operator for name in "01"] == ["linear", "gelu"]
    assert all("test_memory_account.py:" in made[name].line for name in "01")
    in_backward = {b.operator for b in t.top(1000) if b.phase == "backward"}
    assert in_backward & {"mm", "addmm"}
    assert "linear" in t.report()
    assert {row["operator"] for row in t.to_json()["top"]} >= {"linear", "gelu"}


def test_the_backward_of_a_module_has_its_name():
    model = mlp()
    x = torch.randn(BATCH, N, requires_grad=True)
    with ms.memory.track(model) as t:
        model(x).sum().backward()
        gradients = {b.module for b in t.top(100) if b.category == "gradients"}
    assert gradients <= {"0", "1", "2", "3"}
    assert {b.name for b in t.top(1000) if b.category == "gradients"} <= {
        f"{i}.weight" for i in range(LAYERS)
    }


def test_tied_weights_and_buffers_count_once():
    model = nn.Sequential(nn.Linear(N, N), nn.BatchNorm1d(N), nn.Linear(N, N))
    model[2].weight = model[0].weight
    with ms.memory.track(model) as t:
        pass
    sizes = {v.data_ptr(): v.nbytes for v in model.state_dict().values()}
    assert t.at_peak["parameters"] == t.live == t.peak == sum(sizes.values())


def test_nothing_stays_on_the_model():
    model = mlp()
    optimizer = ms.AdamW(model.parameters(), in_backward=True)

    def hooks():
        return (
            [dict(m._forward_hooks) | dict(m._forward_pre_hooks) for m in model.modules()],
            [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
            dict(optimizer._optimizer_step_pre_hooks),
            dict(optimizer._optimizer_step_post_hooks),
        )

    train(model, optimizer)
    before = hooks()

    def fail(x):
        model(x)
        raise KeyError("x")

    with pytest.raises(KeyError):
        train(model, optimizer, forward=fail)
    assert hooks() == before
    train(model, optimizer)
    assert hooks() == before


def test_an_exception_in_a_forward_ends_its_modules():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("x")

    model = nn.Sequential(mlp(1), Fails())
    with ms.memory.track(model) as t:
        with pytest.raises(KeyError):
            model(torch.randn(BATCH, N))
        mlp(1)(torch.randn(BATCH, N))
        model[0](torch.randn(BATCH, N)).sum().backward()
    assert rows_of(t, "backward").any()
    assert not rows_of(t, "recompute").any()


@native_only
def test_many_events_are_read_inside_the_block():
    """Where nobody asks for figures, too, so that a long block does not hold them all."""
    with ms.memory.track() as t:
        for i in range(60_000):
            torch.empty(1 + i % 7)
        unread, most = 120_000, time.monotonic() + 60
        while unread >= 100_000 and time.monotonic() < most:
            time.sleep(0.01)
            unread = 120_000 - sum(len(part.rows) // 5 for part in t._tracker._log._parts)
        assert unread < 100_000
        assert len(t.timeline.time) == 120_001
    assert (t.live, t.peak) == (0, 28)


@native_only
def test_the_log_is_bounded_and_keeps_the_peak():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = ms.memory.track(model, optimizer)
    with whole, ms.memory.track(model, optimizer, max_events=300) as t:
        for i in range(60):
            model(torch.randn(5 * BATCH if i == 20 else BATCH, N)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    check_sums(t)
    assert (t.peak, t.peak_step, t.at_peak) == (whole.peak, 20, whole.at_peak)
    assert len(t.timeline.time) < 600 < len(whole.timeline.time)
    kept = {s.index for s in t.steps}
    assert {20, 59} <= kept
    seconds = {s.index: s.seconds for s in whole.steps}
    for step in t.steps[:-1]:  # those of the two begin and end with the same events
        assert step.seconds == pytest.approx(seconds[step.index], rel=0.5, abs=2e-3)
    assert sum(seconds[i] for i in range(20)) * 0.5 < t.peak_time < sum(seconds.values())
    assert len(t.timeline.gaps) == 2 if 0 in kept else 1
    # What is left says the same as the whole.
    for step in kept:
        rows, all_rows = t.timeline.step == step, whole.timeline.step == step
        highest = t.timeline.live[rows].max(0).values
        assert torch.equal(highest, whole.timeline.live[all_rows].max(0).values)


@native_only
def test_reading_inside_the_block_changes_nothing():
    model = mlp()
    with ms.memory.track(model) as t:
        loss = model(torch.randn(BATCH, N)).sum()
        before = (t.live, t.peak)
        for _ in range(3):
            assert t.at_peak["activations"] > 0
            t.top()
            t.report(file=io.StringIO())
            assert len(t.timeline.time) == len(t.timeline.live)
        assert (t.live, t.peak) == before
        loss.backward()


def test_inference_has_no_activations_that_stay():
    model = mlp()
    x = torch.randn(BATCH, N)

    def infer():
        with torch.no_grad():
            return model(x).sum().item()

    with ms.memory.track(model) as t:
        infer()
        infer()
    assert t.live == LAYERS * WEIGHT
    assert t.at_peak["activations"] == 0
    assert t.at_peak["other"] == 2 * OUTPUT


@native_only
def test_threads_have_forwards_of_their_own():
    """A thread's temporaries stay temporary where another one begins a forward meanwhile, and what
    a third one makes between forward and backward is no activation."""

    class Net(nn.Module):
        def forward(self, x, meanwhile):
            temporary = torch.empty(BATCH, N)
            meanwhile()
            largest = torch.empty(BATCH, N)
            del temporary, largest
            return 2 * x

    def in_a_thread(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    net, x, kept = Net(), torch.ones(1, requires_grad=True), []
    with ms.memory.track(net) as t:
        out = net(x, lambda: in_a_thread(lambda: net(x, lambda: None)))
        assert t.at_peak["activations"] < OUTPUT
        in_a_thread(lambda: kept.append(torch.empty(8 * BATCH, N)))
        out.backward()
    check_sums(t)
    assert t.at_peak["activations"] < OUTPUT
    (largest,) = t.top(1)
    assert (largest.bytes, largest.category, largest.phase) == (8 * OUTPUT, "other", "other")


def test_a_step_that_raises_ends_the_optimizers_phase():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        raise ArithmeticError

    with ms.memory.track(model, optimizer) as t:
        for arguments, names in (([closure], {}), ([], {"closure": closure})):
            with pytest.raises(ArithmeticError):
                optimizer.step(*arguments, **names)
        optimizer.step(lambda: None)
        with pytest.raises(ArithmeticError):
            optimizer.step(closure)
        batch = torch.empty(64 * BATCH, N)
        del batch
    assert t.peak_phase == "other"
    assert t.peak_step == 1


def test_an_optimizer_that_allocates_nothing_has_its_phase():
    model = nn.Linear(4, 4)

    class Negating(torch.optim.Optimizer):
        def __init__(self):
            super().__init__(model.parameters(), {})

        @torch.no_grad()
        def step(self):
            for p in model.parameters():
                p.neg_()

    optimizer = Negating()
    with ms.memory.track(model, optimizer) as t:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    phases = [PHASES[p] for p in t.timeline.phase.unique_consecutive().tolist()]
    assert phases == 2 * ["other", "forward", "backward", "other", "optimizer"] + ["other"]
    rows = (t.timeline.phase == PHASES.index("optimizer")).nonzero().flatten()
    assert torch.equal(t.timeline.live[rows], t.timeline.live[rows - 1])


def test_sparse_gradients():
    embedding = nn.Embedding(1000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()))
    with ms.memory.track(embedding, optimizer) as t:
        embedding(torch.arange(500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert column(t, "gradients").max() >= 500 * 64 * 4
    assert column(t, "gradients")[-1] == 0


class Averages(nn.Module):
    """Its buffer is another tensor after each forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N, N, bias=False)
        self.register_buffer("average", torch.zeros(N, N))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * self.linear.weight.detach()
        return self.linear(x)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_buffers_and_parameters_that_are_replaced(with_optimizer):
    model = Averages()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ms.memory.track(model, optimizer if with_optimizer else None) as t:
        for step in range(4):
            if step == 2:
                model.linear.weight.data = model.linear.weight.data.clone()
            model(torch.randn(4, N)).sum().backward()
            if with_optimizer:
                optimizer.step()
            optimizer.zero_grad()
    last = t.timeline.step == (3 if with_optimizer else 2)
    assert column(t, "parameters")[last][-1] == 2 * WEIGHT


def test_what_the_garbage_collector_frees_while_figures_are_read():
    class Node:
        pass

    class File(io.StringIO):
        def write(self, text):
            gc.collect()
            return super().write(text)

    with ms.memory.track() as t:
        node = Node()
        node.itself, node.data = node, torch.empty(100_000)
        del node
        t.report(file=File())
    assert t.live == 0
