"""Random training loops of an optimizer that in_backward() has taken, beside its ordinary step():
after each action parameters and states are the same to the bit."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch
from own_steps import TORCHS, assert_same, loss, model

import memsave_ext as ms

from .loops import verdict_of

ACTIONS = (
    "step", "step", "step", "accumulate", "lr", "paused", "left", "freeze", "copy", "pickle",
    "load", "take again", "norm pass", "dropped pass", "checkpoint", "closure",
)  # fmt: skip
Pairs = list[tuple[Any, Any]]  # a model and its optimizer: stepped in backward, and ordinary


class Loop:
    def __init__(self, seed: int, without: list[str]) -> None:
        self.rng = random.Random(seed)
        self.name = self.rng.choice(list(TORCHS))
        self.several = self.rng.random() < 0.5
        self.options = {
            "small_bytes": self.rng.choice([0, 64, 1 << 16]),
            "bucket_bytes": self.rng.choice([1, 256, 1 << 20]),
        }
        if self.name == "SGD fused":  # torch's own fails where some parameters have no momentum yet
            without = [*without, "left", "freeze"]
        actions = [action for action in ACTIONS if action not in without]
        self.actions = [self.rng.choice(actions) for _ in range(self.rng.randint(3, 12))]
        nets = [model(flat=self.name == "Muon") for _ in range(2)]
        self.pairs: Pairs = [(net, self.make(net)) for net in nets]
        ms.in_backward(self.pairs[0][1], **self.options)

    def __str__(self) -> str:
        groups = "several groups" if self.several else "one group"
        return f"{self.name}, {groups}, {self.options}: {', '.join(self.actions)}"

    def make(self, net: Any) -> Any:
        if not self.several:
            return TORCHS[self.name](list(net.parameters()))
        modules = (net[0], net[2], net[3])
        return TORCHS[self.name](
            [{"params": list(m.parameters()), "lr": 0.01 * i} for i, m in enumerate(modules, 1)]
        )

    def run(self) -> str:
        for action in self.actions:
            getattr(self, "do_" + action.replace(" ", "_"))(self.rng.randrange(100))
            if not all(p.isfinite().all() for p in self.pairs[1][0].parameters()):
                return ""  # it has diverged, and NaN is not equal to itself
            assert_same(*self.pairs)
        return ""

    def both(self, backward: Callable[[Any], None]) -> None:
        for net, optimizer in self.pairs:
            backward(net)
            optimizer.step()
            optimizer.zero_grad()

    def do_step(self, number: int) -> None:
        self.both(lambda net: loss(net, number).backward())

    def do_accumulate(self, number: int) -> None:
        with self.pairs[0][1].accumulate():
            loss(self.pairs[0][0], number).backward()
        loss(self.pairs[1][0], number).backward()
        self.do_step(number + 1)

    def do_lr(self, number: int) -> None:
        for _, optimizer in self.pairs:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * (0.5 + number % 2)

    def do_paused(self, number: int) -> None:
        with self.pairs[0][1].paused():
            loss(self.pairs[0][0], number).backward()

    def do_left(self, number: int) -> None:
        def backward(net: Any) -> None:
            weight = net[2].weight
            weight.grad = torch.ones_like(weight)
            weight.requires_grad_(False)
            loss(net, number).backward()
            weight.requires_grad_(True)

        self.both(backward)

    def do_freeze(self, number: int) -> None:
        def backward(net: Any) -> None:
            net[number % 2 * 2].requires_grad_(False)
            loss(net, number).backward()
            net.requires_grad_(True)

        self.both(backward)

    def do_copy(self, _: int) -> None:
        self.pairs = [copy.deepcopy(pair) for pair in self.pairs]

    def do_pickle(self, _: int) -> None:
        self.pairs = [pickle.loads(pickle.dumps(pair)) for pair in self.pairs]

    def do_load(self, _: int) -> None:
        saved = self.pairs[1][1].state_dict()
        for _net, optimizer in self.pairs:
            optimizer.load_state_dict(copy.deepcopy(saved))

    def do_take_again(self, number: int) -> None:
        net, optimizer = self.pairs[0]
        optimizer.remove_hooks()
        self.do_step(number)
        again = ms.in_backward(self.make(net), **self.options)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.pairs[0] = net, again

    def do_norm_pass(self, number: int) -> None:
        with self.pairs[0][1].norm_pass(1e300):  # a factor of 1
            loss(self.pairs[0][0], number).backward()
        self.do_step(number)

    def do_dropped_pass(self, number: int) -> None:
        try:
            with self.pairs[0][1].norm_pass(1.0):
                loss(self.pairs[0][0], number).backward()
                raise KeyError
        except KeyError:
            pass

    def do_checkpoint(self, number: int) -> None:
        for take, (net, optimizer) in zip((True, False), self.pairs, strict=True):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number)).requires_grad_()
            y = ms.checkpoint(net, x) if take else net(x)
            (y - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def do_closure(self, number: int) -> None:
        for net, optimizer in self.pairs:

            def closure(net: Any = net, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                value = loss(net, number)
                value.backward()
                return value

            optimizer.step(closure)
            optimizer.zero_grad()


def run_seed(seed: int, without: list[str], shrinks: bool) -> tuple[str, str]:
    loop = Loop(seed, without)
    verdict = verdict_of(loop.run)
    loop.pairs[0][1].remove_hooks()
    return verdict, f"# {loop}"
