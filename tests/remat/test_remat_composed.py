"""Blocks around what else there is in torch and in this package: the bits of plain autograd."""

import torch
import torch.utils.checkpoint
from remat_programs import check, layers
from torch import nn

import memsave_ext as ms


def test_functional_call_and_steps_with_a_graph():
    model, x = layers()
    start = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def program(block):
        with block():
            params = start
            for _ in range(2):
                loss = torch.func.functional_call(model, params, (x,)).square().mean()
                grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
                params = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}
            loss = torch.func.functional_call(model, params, (x,)).square().mean()
        return torch.autograd.grad(loss, list(start.values()))

    check(program)


def test_optimizer_steps_in_the_block():
    def program(block):
        model, x = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with block():
            for _ in range(4):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        return list(model.parameters())

    check(program)


def test_autocast_around_backward():
    model, x = layers()

    def program(block):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            with block():
                loss = model(x).float().square().sum()
            loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters()]

    check(program)


def test_a_backward_in_autocast_alone():
    w = nn.Parameter(torch.rand(8, 8) + 0.5)

    def program(block):
        with block():
            y = w.bfloat16().prod(0).sin()  # autocast would have a product in float32
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(y.sum(), w)

    check(program)


def test_regions_inside():
    model, x = layers()
    first, second = model[:4], model[4:]

    def program(block):
        with block():
            y = ms.checkpoint(first, x).sin()
            y = torch.utils.checkpoint.checkpoint(second, y, use_reentrant=False).tanh()
            y = ms.CheckpointFunction.apply(lambda t, *_: first(t), 1, y, *first.parameters())
            y = second(y.cos().exp())
        return torch.autograd.grad(y.sum(), list(model.parameters()))

    check(program)


def test_a_region_of_what_was_changed_in_place_before():
    w, x = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)

    def program(block):
        with block():
            y = ms.checkpoint(lambda t: (t * w).sin(), (x @ w).mul_(2))
        return torch.autograd.grad(y.sum(), w)

    check(program, drops=None)


def test_blocks_inside_a_region():
    model, x = layers()

    def program(block):
        def function(x):
            with block():
                return model(x)

        return torch.autograd.grad(ms.checkpoint(function, x).sum(), list(model.parameters()))

    check(program, drops=None)


def test_save_on_cpu():
    model, x = layers()
    params = list(model.parameters())

    def outside(block):
        with torch.autograd.graph.save_on_cpu(), block():
            loss = model(x).exp().sum()
        return torch.autograd.grad(loss, params)

    def inside(block):
        with block():
            with torch.autograd.graph.save_on_cpu():
                y = model[:4](x)
            loss = model[4:](y).exp().sum()
        return torch.autograd.grad(loss, params)

    check(outside)
    check(inside)


def test_hooks():
    def program(block):
        model, x = layers()
        seen = []
        for p in model.parameters():
            p.register_hook(lambda grad: grad * 2)
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
        for layer in (*model[:4], model[6]):  # torch has none for modules that work in place
            layer.register_full_backward_hook(lambda *args: seen.append(args[2][0].sum()))
        with block():
            loss = model(x.requires_grad_()).exp().sum()
            loss.backward()
        return [p.grad for p in model.parameters()] + seen

    check(program)
