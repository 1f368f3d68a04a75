"""Allocations that fail are tried again once blocks have dropped memory: the plain run's bits, or
the error."""

import contextlib
import gc
import re
import resource
import threading
from collections import Counter

import pytest
import torch
from helpers import run_threads
from refusing import in_a_process, refusals  # noqa: F401
from test_budget import nothing_is_known_yet, wide  # noqa: F401
from test_remat_models import MODELS
from torch import nn
from torch.nn import functional as F

import memsave_ext as ms

OUT_OF_MEMORY = "not enough memory|can't allocate memory"
OPTIONS = (
    {},
    {"budget": "1TB"},
    {"budget": 0.5},
    {"budget": 0.1},
)


def step(model, x, forward=0.0, backward=0.0, seed=0, **options):
    """Results of a step from the same state as the last one, the block, and refusals of both."""
    torch.manual_seed(3)
    model.zero_grad()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    block = ms.remat(**options)
    try:
        with block, refusals(forward, seed) as first:
            loss = model(x).square().mean()
        before = block.figures().given_back_bytes
        with refusals(backward, seed) as second:
            loss.backward()
        results = [loss.detach(), *(p.grad for p in model.parameters())]
        results += [b.clone() for b in model.buffers()]
    finally:
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
    given = before, block.figures().given_back_bytes - before
    return results, block, given, (first.count, second.count)


def expect_out_of_memory(error):
    assert re.search(OUT_OF_MEMORY, str(error)), error


def test_refusals_at_random(in_a_process):  # noqa: F811
    in_a_process(refuse_models_at_random)


def refuse_models_at_random():
    counts = Counter()
    for number, (build, x) in enumerate(MODELS.values()):
        # Four models have all pairs of options and shares.
        refuse_at_random(build, x, counts, range(5 * number, 5 * number + 5))
    keys = ("forward, given", "backward, given", "planned to keep, given", "error")
    assert min(counts[key] for key in keys) > 3, counts


def refuse_at_random(build, x, counts, seeds):
    torch.manual_seed(0)
    model = build()
    for _ in range(2):
        expected, *_ = step(model, x)
    for seed in seeds:
        options = OPTIONS[seed % len(OPTIONS)]
        shares = ((0.03, 0.0), (0.0, 0.03), (0.03, 0.03), (0.3, 0.0), (0.0, 0.3))[seed % 5]
        try:
            actual, _, given, refused = step(model, x, *shares, seed=seed, retry=True, **options)
        except RuntimeError as error:
            expect_out_of_memory(error)
            counts["error"] += 1
            # Nothing of the step that ended in the middle is left.
            actual, *_ = step(model, x, **options)
        else:
            for where, given_there, refused_there in zip(
                ("forward", "backward"), given, refused, strict=True
            ):
                counts[where] += refused_there > 0
                counts[f"{where}, given"] += given_there > 0
                assert (given_there > 0) <= (refused_there > 0)
            if options.get("budget") == "1TB":  # whose plan keeps everything
                counts["planned to keep, given"] += sum(given) > 0
        assert all(map(torch.equal, expected, actual))


def test_without_retry_the_error_goes_on(in_a_process):  # noqa: F811
    in_a_process(refuse_without_retry)


def refuse_without_retry():
    model, x = wide()
    errors = 0
    for seed in range(10):
        try:
            _, block, _, refused = step(model, x, 0.2, 0.2, seed=seed)
        except RuntimeError:
            errors += 1
        else:
            assert sum(refused) == block.figures().given_back_bytes == 0
    assert errors > 5


def test_a_limit_that_the_step_does_not_fit_into(in_a_process):  # noqa: F811
    in_a_process(limit_address_space)


def limit_address_space():
    """Of the process's memory. A step in half of the plain one's ends in an error without retry."""
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]
    model = nn.Sequential(*layers)
    x = torch.randn(1024, 512)
    for _ in range(2):
        expected, block, *_ = step(model, x, budget="1TB")
    plain = block.peak - block._recorder.budget()["before"]
    del block
    for share in (0.8, 0.5, 0.4):
        gc.collect()
        fields = (line.split() for line in open("/proc/self/status"))  # noqa: SIM115
        size = next(1024 * int(words[1]) for words in fields if words[0] == "VmSize:")
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + int(share * plain), limits[1]))
        with pytest.raises(RuntimeError, match=OUT_OF_MEMORY):
            step(model, x, budget="1TB")
        actual, block, *_ = step(model, x, budget="1TB", retry=True)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert all(map(torch.equal, expected, actual))
        print(share, plain >> 20, block.figures().given_back_bytes >> 20, block.peak >> 20)
        assert "Allocations failed, and " in block.report()
        del block, actual


def test_plans_are_made_of_steps_that_gave_memory_back(in_a_process):  # noqa: F811
    in_a_process(plan_after_refusals)


def plan_after_refusals():
    """Their trace is that of a step in which nothing was dropped."""
    peaks = []
    for share in (0.0, 0.03):
        model, x = wide(layers=16)
        given = ()
        for seed in range(100):
            ms._native.module.remat_forget()
            with contextlib.suppress(RuntimeError):
                *_, given, _ = step(model, x, share, share, seed, budget="1TB", retry=True)
            if share == 0 or (given and min(given) > 0):
                break
        assert (min(given) > 0) == (share > 0)
        _, block, *_ = step(model, x, budget=0.4)
        peaks.append((block.least, block.peak, block.budget))
    for plain, given_back in zip(*peaks, strict=True):
        assert given_back == pytest.approx(plain, rel=0.02)


def test_other_threads_and_nested_blocks(in_a_process):  # noqa: F811
    in_a_process(refuse_elsewhere)


def refuse_elsewhere():
    model, x = wide()
    expected, *_ = step(model, x)
    outer = ms.remat(retry=True, budget="1TB")
    made = []

    def allocate():
        with refusals(0.5, seed=1) as refused:
            made.extend(torch.empty(1 << 14) for _ in range(3))
        made.append(refused.count)

    model.zero_grad()
    torch.manual_seed(3)
    with outer:
        y = model[:4](x)
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        first = outer.figures().given_back_bytes
        with ms.remat(retry=True, budget="1TB") as inner, refusals(0.1, seed=2) as refused:
            loss = model[4:](y).square().mean()
    assert made[-1] > 0 and first > 0 and refused.count > 0
    assert outer.figures().given_back_bytes > first
    loss.backward()
    assert all(map(torch.equal, expected, [loss.detach(), *(p.grad for p in model.parameters())]))
    given = outer.figures().given_back_bytes + inner.figures().given_back_bytes
    # Blocks whose steps are over have nothing to give.
    with pytest.raises(RuntimeError, match=OUT_OF_MEMORY), refusals(1.0):
        torch.empty(1 << 14)
    assert outer.figures().given_back_bytes + inner.figures().given_back_bytes == given


def test_steps_in_threads_give_way_to_each_other(in_a_process):  # noqa: F811
    in_a_process(refuse_in_threads)


def refuse_in_threads():
    work = [wide(width=width) for width in (48, 64, 80, 96)]
    plain = [step(model, x)[0] for model, x in work]
    given, ended = [], []

    def run(i):
        model, x = work[i]
        for _ in range(8):
            for p in model.parameters():
                p.grad = None
            block = ms.remat(budget="1TB", retry=True)
            try:
                with block:
                    loss = model(x).square().mean()
                loss.backward()
            except RuntimeError as error:
                expect_out_of_memory(error)
                continue
            given.append(block.figures().given_back_bytes)
            found = [loss.detach(), *(p.grad for p in model.parameters())]
            ended.append(all(map(torch.equal, plain[i], found)))

    with refusals(0.01, seed=1) as refused:
        run_threads(run, len(work))
    assert refused.count > 0 and any(given)
    assert len(ended) > 8 and all(ended)


def test_values_written_in_place_are_not_computed_from(in_a_process):  # noqa: F811
    in_a_process(write_in_place)


def write_in_place():
    """Memory is asked for while an operator writes what saved values are computed from: a value
    that is computed itself, and one from outside the block, which nothing computes again."""
    counts = Counter()
    torch.manual_seed(5)
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(64, 64) / 64  # so that exp() stays finite
    scale = 1 + torch.rand(64, 64, dtype=torch.float64)
    other = torch.randn(64, 128).div(64)[:, ::2]

    def run(rounds, seed, share, **options):
        weight.grad = None
        loss = torch.zeros(())
        outside = x.clone()
        with ms.remat(budget="1TB", **options) as block, refusals(share, seed) as refused:
            y = x @ weight
            for _ in range(rounds):
                # More memory than what it is computed from.
                loss = loss + (outside.repeat(8, 1) * weight.repeat(8, 1)).exp().mean()
                loss = loss + (y.repeat(8, 1) / 8).exp().mean()
                outside.addmm_(other, other)  # of copies without gaps
                y.mul_(scale)  # in float64, which takes memory
                y = y + 1
        with refusals(share / 4, seed):
            loss.backward()
        counts["refused"] += refused.count > 0 and block.figures().given_back_bytes > 0
        return loss.detach(), weight.grad

    for rounds, share in (1, 0.2), (6, 0.04):
        expected = run(rounds, 0, 0.0)
        assert all(v.isfinite().all() and v.any() for v in expected)
        for seed in range(150):
            try:
                actual = run(rounds, seed, share, retry=True)
            except RuntimeError as error:
                expect_out_of_memory(error)
                counts["error"] += 1
            else:
                assert all(map(torch.equal, expected, actual)), (rounds, seed)
    assert counts["refused"] > 20 < counts["error"], counts


def test_parameters_that_are_stepped_in_backward(in_a_process):  # noqa: F811
    in_a_process(step_in_backward)


def step_in_backward():
    """Nothing is dropped that would be computed from a parameter that an optimizer is stepping."""
    counts = Counter()
    x = torch.arange(96).reshape(4, 24) % 32

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 64)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, tokens):
            y = self.embed(tokens)
            for layer in self.layers:
                y = y + F.gelu(layer(y)).tanh()
            return y @ self.embed.weight.t()

    def train(seed, share, **options):
        torch.manual_seed(0)
        model = Tied()
        optimizer = ms.AdamW(model.parameters(), lr=0.1, in_backward=True)
        for number in range(3):
            with ms.remat(**options) as block:
                loss = model(x).square().mean()
            with refusals(share if number == seed % 3 else 0.0, seed) as refused:
                loss.backward()
            counts["given"] += refused.count > 0 and block.figures().given_back_bytes > 0
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    expected = train(0, 0.0)
    for seed in range(400):  # as many as it takes: what is cheap to drop is measured
        if seed >= 40 and counts["given"] > 10:
            break
        try:
            actual = train(seed, 0.1, retry=True, **OPTIONS[seed % 4])
        except RuntimeError as error:
            expect_out_of_memory(error)
            counts["error"] += 1
        else:
            assert all(map(torch.equal, expected, actual))
    assert counts["given"] > 10, counts


@pytest.mark.parametrize(
    "make", [ms.remat, lambda **options: ms.remat_module(wide()[0], **options)]
)
def test_what_is_no_retry(make):
    with pytest.raises(TypeError, match="remat: retry must be True or False, got "):
        make(retry=1)


def test_nothing_is_given_back_where_nothing_fails():
    model, x = wide()
    handle = ms.remat_module(model, retry=True)
    expected, *_ = step(model, x)
    handle.remove()
    actual, block, *_ = step(model, x, retry=True)
    assert all(map(torch.equal, expected, actual))
    assert block.figures().given_back_bytes == 0
    assert "Allocations failed" not in block.report()
