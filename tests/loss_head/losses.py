"""The loss by torch's operators, and what tests compare with it."""

import torch
import torch.nn.functional as F

import memsave_ext as ms

CHUNK = 256
REDUCTIONS = ["mean", "sum", "none"]


def plain(input, linear_weight, target, *, linear_bias=None, softcap=None, **options):
    logits = F.linear(input, linear_weight, linear_bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if options.get("ignore_index", 0) is None:
        del options["ignore_index"]
    return F.cross_entropy(logits, target, **options)


def chunked(*args, **options):
    return ms.linear_cross_entropy(*args, chunk_size=CHUNK, **options)


def problem(tokens=17, features=12, classes=600, dtype=torch.float32, **of):
    """Input and weight, which need gradients, and class indices or probabilities."""
    generator = torch.Generator().manual_seed(of.get("seed", 0))

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    if of.get("probabilities"):
        target = torch.randn(tokens, classes, generator=generator).softmax(1).to(dtype)
    else:
        target = torch.randint(classes, (tokens,), generator=generator)
    return normal(tokens, features), normal(classes, features), target


def in_dtype(values, dtype):
    """Copies that need gradients where the values do."""
    return [
        v.detach().to(dtype).requires_grad_(v.requires_grad)
        if isinstance(v, torch.Tensor) and v.is_floating_point()
        else v
        for v in values
    ]


def gradients(loss, tensors, grad=None):
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    if not wanted:
        return [loss.detach()]
    grad = None if grad is None else grad.to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, wanted, grad)]
