"""Random trainings of models whose weights lie in a file, beside plain ones: the same bits."""

from __future__ import annotations

import copy
import gc
import random
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memsave_ext as ms
from memsave_ext import _native
from memsave_ext.store.mapped import is_mapped

from .loops import verdict_of

WIDTH = 132  # a square of it is 69,696 bytes: more than stays in memory


class Tied(nn.Module):
    """Two layers of one weight, in a module that has no weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Rows(nn.Module):
    """An embedding, of which a step reads a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x.detach().sum(-1).abs() * 100).long() % 200)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Reads(nn.Module):
    """Uses a weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.inner.weight.t()) + self.inner.bias


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "tied": Tied,
    "rows": Rows,
    "recurrent": Recurrent,
    "attention": Attention,
    "reads": Reads,
}
OPTIMIZERS: dict[str, Callable[[Any, str], Any]] = {
    "AdamW": lambda p, _: torch.optim.AdamW(p),
    "AdamW, foreach": lambda p, _: torch.optim.AdamW(p, foreach=True),
    "SGD": lambda p, _: torch.optim.SGD(p, 0.1, momentum=0.9),
    "ours": lambda p, _: ms.AdamW(p),
    "in backward": lambda p, _: ms.AdamW(p, in_backward=True),
    "8 bit": lambda p, _: ms.AdamW(p, in_backward=True, state_dtype="8bit"),
    "states": lambda p, folder: ms.AdamW(p, in_backward=True, states_on=folder),
    "gradients": lambda p, folder: ms.AdamW(p, grads_on=folder, states_on=folder),
    "NAdam in backward": lambda p, _: ms.in_backward(torch.optim.NAdam(p)),
}
WRAPS = ("", "checkpoint", "budget")
# What happens to model and weights before, in or after a step; on the plain model what is the same.
EVENTS = (
    "let go", "let go before backward", "evaluate", "evaluate in a thread", "write", "load",
    "load from a file", "copy", "remove", "again", "freeze", "collect", "average",
)  # fmt: skip
Case = dict[str, Any]


def generate(seed: int, without: list[str]) -> Case:
    rng = random.Random(seed)
    chosen = [name for name in LAYERS if name not in without]
    events = [name for name in EVENTS if name not in without]
    wraps = [w for w in WRAPS if w not in without and (w != "budget" or _native.available)]
    steps = rng.randint(1, 5)
    return {
        # The first one may be frozen; with the last there is always something to train.
        "layers": ["linear", *(rng.choice(chosen) for _ in range(rng.randint(0, 4))), "linear"],
        "optimizer": rng.choice([name for name in OPTIMIZERS if name not in without]),
        "wrap": rng.choice(wraps),
        "built": rng.random() < 0.3,
        "first": rng.random() < 0.3,  # whether the optimizer is made before
        "clipped": rng.random() < 0.3,
        "events": [rng.choice(events) if rng.random() < 0.6 else "" for _ in range(steps)],
    }


class Training:
    def __init__(self, case: Case, folder: str, elsewhere: bool) -> None:
        self.case, self.folder, self.elsewhere = case, folder, elsewhere
        self.handles: list[Any] = []
        after = elsewhere and not case["built"]
        self.model = self._take(self._build) if elsewhere and case["built"] else self._build()
        if after and not case["first"]:
            self._take(self.model)
        self.optimizer = OPTIMIZERS[case["optimizer"]](self.model.parameters(), folder)
        if after and case["first"]:
            self._take(self.model)
        if case["wrap"] == "checkpoint":
            ms.checkpoint_modules(self.model, (nn.Linear, Tied, Recurrent))
        if case["wrap"] == "budget":
            ms.remat_module(self.model, budget=0.6)
        self.average: torch.optim.swa_utils.AveragedModel | None = None

    def _build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(LAYERS[name]() for name in self.case["layers"]))

    def _take(self, model: Any) -> nn.Module:
        self.handles.append(ms.weights_on(model, self.folder))
        model = self.handles[-1].model
        assert isinstance(model, nn.Module)
        return model

    @property
    def mapped(self) -> int:
        return sum(is_mapped(param) for param in self.model.parameters())

    def step(self, number: int) -> float:
        torch.manual_seed(100 + number)
        x = torch.randn(2, 3, WIDTH)
        event = self.case["events"][number]
        self.before(event, x)
        loss = self.model(x).square().mean()
        if event == "let go before backward":
            self.let_go()
        loss.backward()
        if self.case["clipped"] and self.case["optimizer"] not in IN_BACKWARD:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return float(loss.detach())

    def before(self, event: str, x: torch.Tensor) -> None:
        if event == "let go":
            self.let_go()
        elif event.startswith("evaluate"):
            if event == "evaluate":
                self.evaluate(x)
            else:
                thread = threading.Thread(target=self.evaluate, args=(x,))
                thread.start()
                thread.join()
        elif event == "write":
            with torch.no_grad():
                for param in self.model.parameters():
                    param.mul_(0.75)
        elif event == "load":
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.model.load_state_dict({name: value * 0.5 for name, value in state.items()})
        elif event == "load from a file":
            with tempfile.TemporaryFile() as file:
                torch.save(self.model.state_dict(), file)
                file.seek(0)
                self.model.load_state_dict(torch.load(file))
        elif event == "copy":
            twin = copy.deepcopy(self.model)
            twin(x).sum().backward()
            assert not any(map(is_mapped, twin.parameters()))
        elif event == "remove":
            for handle in self.handles:
                handle.remove()
            assert self.mapped == 0
        elif event == "again" and self.elsewhere:
            self._take(self.model)
        elif event == "freeze":
            self.model[0].requires_grad_(not next(self.model[0].parameters()).requires_grad)
        elif event == "collect":
            gc.collect()
        elif event == "average":
            self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def let_go(self) -> None:
        for handle in self.handles:
            handle.let_go()

    def evaluate(self, x: torch.Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(x)
        self.model.train()


IN_BACKWARD = ("in backward", "8 bit", "states", "NAdam in backward")


def check(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        plain, ours = (Training(case, folder, elsewhere) for elsewhere in (False, True))
        if ours.mapped == 0:
            return "wrong: nothing lies elsewhere"
        for number in range(len(case["events"])):
            losses = plain.step(number), ours.step(number)
            if losses[0] != losses[1]:
                return f"other bits: step {number}: losses {losses}"
        for what in ("model", "average"):
            if (model := getattr(plain, what)) is None:
                continue
            others = getattr(ours, what).parameters()
            for (name, p), q in zip(model.named_parameters(), others, strict=True):
                if not torch.equal(p, q):
                    return f"other bits: {what}: {name}"
        return ""


def guarded(case: Case) -> str:
    return verdict_of(lambda: check(case))


def shrink(case: Case, verdict: str) -> Case:
    progress = True
    while progress:
        progress = False
        smaller = [{**case, name: False} for name in ("built", "first", "clipped") if case[name]]
        smaller += [{**case, "wrap": ""}] if case["wrap"] else []
        layers, events = case["layers"], case["events"]
        inner = range(1, len(layers) - 1)
        smaller += [{**case, "layers": layers[:i] + layers[i + 1 :]} for i in inner]
        for i in range(len(events)):
            if len(events) > 1:
                smaller.append({**case, "events": events[:i] + events[i + 1 :]})
            if events[i]:
                smaller.append({**case, "events": [*events[:i], "", *events[i + 1 :]]})
        for other in smaller:
            if guarded(other)[:10] == verdict[:10]:
                case, progress = other, True
                break
    return case


def run_seed(seed: int, without: list[str], shrinks: bool) -> tuple[str, str]:
    case = generate(seed, without)
    verdict = guarded(case)
    if not verdict:
        return "", ""
    if shrinks:
        case = shrink(case, verdict)
        verdict = guarded(case)
    return verdict, f"# {case}"
