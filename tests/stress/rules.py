"""Random training loops of SGD and Lion. After each action, what is stepped in backward is to the
bit what is stepped after it; SGD also torch's, and Lion near an oracle in float64."""

from __future__ import annotations

import copy
import pickle
import threading

import torch
from torch import Tensor

import memsave_ext as ms

from .loops import verdict_of
from .rule_runs import Run, Runs, file_of, same

ACTIONS = (
    "step", "step", "step", "options", "options", "accumulate", "paused", "left", "missing",
    "copy", "pickle", "load", "make again", "norm pass", "dropped pass", "closure", "raise",
    "zeros", "scaled", "infinite", "clipped", "move", "threads", "two losses", "twice used",
)  # fmt: skip


class Loop(Runs):
    def __init__(self, seed: int, without: list[str]) -> None:
        super().__init__(seed)
        actions = [action for action in ACTIONS if action not in without]
        self.actions = [self.rng.choice(actions) for _ in range(self.rng.randint(3, 12))]

    def run(self) -> str:
        for number, action in enumerate(self.actions):
            self.notes.append(action)
            getattr(self, "do_" + action.replace(" ", "_"))()
            if wrong := self.difference():
                return f"wrong: action {number}, {action}: {wrong}"
        return ""

    def do_step(self, missing: float = 0.0) -> None:
        grads = self.grads(missing)
        for run in self.all():
            run.step(grads)
        self.follow(grads)

    def do_missing(self) -> None:
        self.do_step(0.5)

    def do_options(self) -> None:
        number = self.rng.randrange(2)
        name, value = self.rng.choice(self.choices())
        self.notes.append(f"{name}={value!r} of group {number}")
        for run in self.all():
            group = run.optimizer.param_groups[number % len(run.optimizer.param_groups)]
            group[name] = value
            if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
                group["nesterov"] = False  # as torch asks for when it is made

    def do_accumulate(self) -> None:
        first, second = self.grads(0.2), self.grads(0.2)
        sums = []
        for a, b in zip(first, second, strict=True):
            both = [g.resolve_conj().resolve_neg() for g in (a, b) if g is not None]
            sums.append(sum(both[1:], both[0]) if both else None)
        for run in self.all():
            if run.in_backward:
                with run.optimizer.accumulate():
                    run.loss(first).backward()
            else:
                run.loss(first).backward()
            run.loss(second).backward()
            run.end()
        self.follow(sums)

    def do_paused(self) -> None:
        with self.runs[0].optimizer.paused():
            self.runs[0].loss(self.grads()).backward()

    def do_left(self) -> None:
        """A gradient set by hand, which step() finds."""
        number = self.rng.randrange(len(self.about))
        grads = self.grads(0.3)
        for run in self.all():
            param = run.params[number]
            others = [None if i == number else g for i, g in enumerate(grads)]
            run.loss(others).backward()
            param.grad = None if grads[number] is None else grads[number].clone()
            run.end()
        self.follow(grads)

    def do_copy(self) -> None:
        for run in self.all():
            run.params, run.optimizer = copy.deepcopy((run.params, run.optimizer))

    def do_pickle(self) -> None:
        for run in self.all():
            run.params, run.optimizer = pickle.loads(pickle.dumps((run.params, run.optimizer)))

    def do_load(self) -> None:
        """Each its own, by a file; torch's goes into ours, and back, where they are the same."""
        for run in self.all():
            saved = file_of(run.optimizer.state_dict())
            run.optimizer.load_state_dict(saved)
        if self.torchs is not None and not self.modes and self.rng.random() < 0.5:
            ours, theirs = (file_of(r.optimizer.state_dict()) for r in (self.runs[0], self.torchs))
            dampens = any(g["dampening"] for g in ours["param_groups"])
            if dampens:  # a count that torch has not
                return
            self.torchs.optimizer.load_state_dict(ours)
            for run in self.runs:
                run.optimizer.load_state_dict(copy.deepcopy(theirs))

    def do_make_again(self) -> None:
        for run in self.runs:
            ms.remove_hooks(run.params)
            saved = file_of(run.optimizer.state_dict())
            groups = [{"params": g["params"]} for g in run.optimizer.param_groups]
            run.optimizer = run.make(groups)
            run.optimizer.load_state_dict(saved)

    def do_norm_pass(self) -> None:
        run = self.runs[0]
        if "max_grad_norm" not in self.modes:
            grads = self.grads(0.2)
            with run.optimizer.norm_pass(1e300):  # a factor of 1
                run.loss(grads).backward()
            for each in self.all():
                each.step(grads)
            self.follow(grads)

    def do_dropped_pass(self) -> None:
        run = self.runs[0]
        if "max_grad_norm" in self.modes:
            return
        try:
            with run.optimizer.norm_pass(1.0):
                run.loss(self.grads()).backward()
                raise KeyError
        except KeyError:
            pass

    def do_clipped(self) -> None:
        run = self.runs[0]
        if "max_grad_norm" in self.modes:
            return
        grads = self.grads()
        with run.optimizer.norm_pass(0.5):
            run.loss(grads).backward()
        run.step(grads)
        self.forget()

    def do_closure(self) -> None:
        grads = self.grads(0.2)
        for run in self.all():

            def closure(run: Run = run) -> Tensor:
                run.optimizer.zero_grad()
                value = run.loss(grads)
                value.backward()
                return value

            run.optimizer.step(closure)
            run.optimizer.zero_grad()
        self.follow(grads)

    def do_raise(self) -> None:
        """A backward that raises on its way: each parameter is stepped, or as it was."""
        run, grads = self.runs[0], self.grads()
        before = [p.detach().clone() for p in run.params]
        stop = self.rng.randrange(len(run.params))

        def fail(param: Tensor) -> None:
            raise KeyError("spoilt")

        handle = run.params[stop].register_post_accumulate_grad_hook(fail)
        raised = ""
        try:
            run.loss(grads).backward()
        except KeyError:
            raised = "as it should"
        handle.remove()
        assert raised, "no error"
        if self.rng.random() < 0.5:
            said = ""
            try:
                run.optimizer.step()
            except RuntimeError as error:
                said = str(error)
            if not said:
                self.forget()
                run.optimizer.zero_grad()
                return
            assert "zero_grad()" in said, said
        run.optimizer.zero_grad()
        self.runs[1].step(grads)
        for p, old, q in zip(run.params, before, self.runs[1].params, strict=True):
            assert same(p, old) or same(p, q), "half a step"
        self.forget()

    def do_zeros(self) -> None:
        """zero_grad(set_to_none=False) beside zeros."""
        for run in self.all():
            run.optimizer.zero_grad(set_to_none=False)
            run.optimizer.zero_grad()

    def do_scaled(self, infinite: bool = False) -> None:
        if any(about[0].is_complex for about in self.about):
            return
        grads = self.grads()
        if infinite:
            for g in grads:
                if g is not None and g.numel() and self.rng.random() < 0.5 and is_own(g):
                    g.view(-1)[0] = torch.inf
        for run in self.runs if infinite else self.all():
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            if run.kind is not torch.optim.SGD:
                run.optimizer.grad_scaler = scaler
            run.loss(grads, scaler.scale).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            if run.kind is not torch.optim.SGD:
                run.optimizer.grad_scaler = None
        if infinite:
            self.forget()
        else:
            self.follow(grads)

    def do_infinite(self) -> None:
        self.do_scaled(infinite=True)

    def do_move(self) -> None:
        """The last parameter leaves its group and comes back in one of its own."""
        for run in self.all():
            groups = run.optimizer.param_groups
            if len(groups) > 3 or len(groups[-1]["params"]) < 2:
                return
            param = groups[-1]["params"].pop()
            run.optimizer.add_param_group({"params": [param], "lr": 0.03})

    def do_threads(self) -> None:
        """Each parameter's backward in a thread of its own."""
        grads = self.grads()
        for run in self.all():
            errors: list[BaseException] = []

            def work(i: int, run: Run = run, errors: list[BaseException] = errors) -> None:
                try:
                    alone = [g if j == i else None for j, g in enumerate(grads)]
                    run.loss(alone).backward()
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(len(run.params))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
            run.close()
        self.follow(grads)

    def do_two_losses(self) -> None:
        """Two backwards before a step, each of other parameters."""
        grads, half = self.grads(), self.rng.randrange(len(self.about) + 1)
        for run in self.all():
            run.loss([g if i < half else None for i, g in enumerate(grads)]).backward()
            run.loss([None if i < half else g for i, g in enumerate(grads)]).backward()
            run.close()
        self.follow(grads)

    def do_twice_used(self) -> None:
        """A parameter gets its gradient in two parts of one backward."""
        grads = self.grads()
        halves = [None if g is None else g.resolve_conj().resolve_neg() / 2 for g in grads]
        for run in self.all():
            (run.loss(halves) + run.loss(halves)).backward()
            run.close()
        self.follow([None if h is None else h + h for h in halves])


def is_own(tensor: Tensor) -> bool:
    """Whether each element has memory of its own, with the values that it shows."""
    return tensor.is_contiguous() and not tensor.is_neg()


def run_seed(seed: int, without: list[str], shrinks: bool) -> tuple[str, str]:
    loop = Loop(seed, without)
    verdict = verdict_of(loop.run)
    for run in loop.runs:
        ms.remove_hooks(run.params)
    return verdict, f"# {loop}"
