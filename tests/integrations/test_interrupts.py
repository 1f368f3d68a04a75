"""Ctrl-C at any line of the package: it comes through, and later steps are as if it never came."""

import ast
import copy
import functools
import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import sampling
import torch
from libraries import library
from processes import call_in_a_process
from torch import nn

import memsave_ext as ms
from memsave_ext import _native as native

PACKAGE = str(Path(ms.__file__).parent)
# Python ignores what is raised in these, called where something is freed.
CALLBACKS = ("_forget", "forget", "<lambda>", "__del__")
# Nobody ends what was to be ended, where that is interrupted itself.
ENDS = ("stop", "_end", "close", "remove", "undo", "__exit__")
natively = pytest.mark.skipif(not native.available, reason="budgets are kept natively")


class Lines:
    """Counts the package's lines that run inside, and interrupts that of this number or the next.

    ``first``: by line, its number when it ran first where it may be interrupted.
    """

    def __init__(self, number=None):
        self.count, self.number, self.where = 0, number, None
        self.first = {}

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _called(self, frame, event, arg):
        return self._ran if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _ran(self, frame, event, arg):
        if event == "line":
            self.count += 1
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if self.number is None and where not in self.first and may_be_interrupted(frame):
                self.first[where] = self.count
            if self.number is not None and self.count >= self.number and may_be_interrupted(frame):
                self.where = where
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._ran


def may_be_interrupted(frame):
    """Not where something is being ended, nor where torch asks a fake tensor for its device, which
    ends the process."""
    if frame.f_locals.get("func") is torch.ops.prim.device.default:
        return False
    inside = frame
    while inside is not None:
        code = inside.f_code
        if code.co_name in CALLBACKS + ENDS:
            return False
        if code.co_filename.startswith(PACKAGE) and inside.f_lineno in ending(code.co_filename):
            return False
        inside = inside.f_back
    return True


@functools.cache
def ending(file):
    """The lines of what runs in any case: of ``finally``, and where BaseException is caught."""
    blocks = []
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Try):
            blocks.append(node.finalbody)
            blocks += [h.body for h in node.handlers if ast.unparse(h.type) == "BaseException"]
    return {n for b in blocks for each in b for n in range(each.lineno, each.end_lineno + 1)}


class Trained(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable  # of the model, within whatever a forward is to run in


X = torch.linspace(-1, 1, 16 * 32).view(16, 32)


def net():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
    return nn.Sequential(*blocks)


def loss_of(model):
    return model(X).square().mean()


def in_block(**options):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    if "budget" in options:
        options["optimizer"] = optimizer

    def loss():
        with ms.remat(model, **options):
            return loss_of(model)

    return Trained(model, optimizer, loss)


def in_the_module():
    model = net()
    optimizer = ms.AdamW(model.parameters(), in_backward=True)
    ms.remat_module(model, budget="0.12MB", optimizer=optimizer, by_module=True)
    return Trained(model, optimizer, lambda: loss_of(model))


def checkpointed():
    model = net()
    ms.checkpoint_modules(model, lambda module: isinstance(module, nn.GELU))
    optimizer = ms.in_backward(torch.optim.AdamW(model.parameters()))
    return Trained(model, optimizer, lambda: loss_of(model))


def accumulated():
    model = net()
    optimizer = ms.AdamW(model.parameters(), in_backward=True)

    def loss():
        with optimizer.accumulate():
            loss_of(model).backward()
        return loss_of(model)

    return Trained(model, optimizer, loss)


def tracked():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def loss():
        with ms.memory.track(model, optimizer):
            return loss_of(model)

    return Trained(model, optimizer, loss)


def fitted():
    """What fit() applies; here most of its time goes into predictions, with remat and without."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fit = []

    def loss():
        if not fit:
            fit.append(ms.fit(model, optimizer, X, budget="0.21MB", loss=lambda y: y.sum()))
        return loss_of(model)

    return Trained(model, optimizer, loss)


def patched():
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    ms.patch_causal_lm(model)
    optimizer = ms.AdamW(model.parameters(), in_backward=True)
    if native.available:
        ms.remat_module(model, budget="0.4MB", optimizer=optimizer)
    tokens = torch.arange(48).view(3, 16)
    return Trained(model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


def step(trained):
    loss = trained.loss()
    loss.backward()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    return loss.detach()


def results(trained):
    return [step(trained), step(trained), *(p.detach().clone() for p in trained.model.parameters())]


def forget_plans():
    if native.available:
        native.module.remat_forget()


def assert_blocks_record(plans):
    """``plans``: whether a first step is planned, too, which takes a process."""
    x = torch.randn(64, requires_grad=True)
    with (block := ms.remat(_everything=True)):
        loss = x.exp().sin().sum()
    loss.backward()
    assert block.figures().dropped_bytes > 0
    forget_plans()
    if not plans:
        return
    model = net()
    with (block := ms.remat(model, budget="1MB")):
        loss = loss_of(model)
    assert block.least is not None, block._measured  # its first step was planned
    loss.backward()


KINDS = {  # and how many lines are interrupted with --full
    "block": (lambda: in_block(_everything=True), 40),
    "budget": (lambda: in_block(budget="0.12MB"), 60),
    "module": (in_the_module, 40),
    "checkpoint": (checkpointed, 50),
    "accumulate": (accumulated, 50),
    "track": (tracked, 50),
    "fit": (fitted, 16),
    "patch": (patched, 16),
}
FEW = 16  # without it


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=natively if kind in ("budget", "module") else ())
        for kind in sampling.share(KINDS, 2)
    ],
)
def test_interrupts(kind):
    """In a process of its own, as what an interrupt leaves behind would be met by other tests."""
    if kind == "patch":
        library("transformers")
    call_in_a_process(interrupt, kind, KINDS[kind][1] if sampling.full else FEW)


def interrupt(kind, most):
    """Interrupts each line of the package that a step runs, or some, where it runs first."""
    warnings.simplefilter("ignore")  # of budgets that are too small
    torch.set_num_threads(1)
    build, _ = KINDS[kind]
    expected = results(build())
    assert all(map(torch.equal, expected, results(build())))
    trained = build()
    forget_plans()
    with Lines() as lines:
        step(trained)
    numbers = sorted(lines.first.values())
    numbers = random.Random(0).sample(numbers, min(most, len(numbers)))
    reached = 0
    for number in numbers:
        trained = build()
        forget_plans()
        before = copy.deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
        with Lines(number) as lines:
            try:
                step(trained)
            except KeyboardInterrupt:
                reached += 1
        try:
            trained.optimizer.zero_grad()
            trained.model.load_state_dict(before[0])
            trained.optimizer.load_state_dict(before[1])
            assert all(map(torch.equal, expected, results(trained)))
            if native.available:
                assert_blocks_record(plans=reached % 4 == 0)
        except Exception as error:
            raise AssertionError(f"after an interrupt at {lines.where}") from error
    # Not all: some lines run once in a process.
    assert reached > 0.5 * len(numbers) >= 8, (reached, len(numbers))


@natively
@pytest.mark.parametrize("at_begin", [True, False])
def test_an_interrupt_of_what_hears_of_recomputes(at_begin):
    """C++ calls it from a constructor and a destructor, which let nothing through."""
    heard = []

    def listener(of_region, begins):
        heard.append(begins)
        if begins == at_begin:
            raise KeyboardInterrupt

    x = X.clone().requires_grad_()
    loss = ms.checkpoint(lambda x: x.sin().exp(), x).sum()
    # A job in the background of a shell may ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    native.module.listen_to_recomputes(listener)
    try:
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    finally:
        native.module.listen_to_recomputes(None)
        signal.signal(signal.SIGINT, before)
    assert heard == [True, False]
    y = X.clone().requires_grad_()
    ms.checkpoint(lambda x: x.sin().exp(), y).sum().backward()
    assert torch.equal(y.grad, y.detach().cos() * y.detach().sin().exp())
