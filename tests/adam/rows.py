"""A model whose head's rows are stepped in backward, and why they are not where that cannot be."""

import contextlib
import warnings

import torch

import memsave_ext as ms

CHUNK = 256
WHOLE = (
    "memsave_ext: loss head: the gradient of linear_weight is made as a whole, not part by part: "
)
PYTHON = "optimizers of memsave_ext run in pure Python"
CLASSES, FEATURES, TOKENS = 1000, 24, 50  # 1000: the last chunk is smaller, its last block, too


class Model:
    """A linear layer and a head."""

    debug = False

    def __init__(self, dtype=torch.float32, classes=CLASSES, **options):
        torch.manual_seed(1)
        self.first = torch.nn.Parameter(torch.randn(FEATURES, FEATURES).to(dtype))
        self.head = torch.nn.Parameter(torch.randn(classes, FEATURES).to(dtype))
        options = {"lr": 1e-2, "in_backward": True, **options}
        self.optimizer = ms.Adam([self.first, self.head], **options)
        self.made = 0

    def batch(self):
        """(what the head is given, target); others in each call."""
        generator = torch.Generator().manual_seed(self.made)
        self.made += 1
        x = torch.randn(TOKENS, FEATURES, generator=generator).to(self.first.dtype)
        target = torch.randint(self.head.shape[0], (TOKENS,), generator=generator)
        return x @ self.first, target

    def loss(self, **options):
        hidden, target = self.batch()
        options = {"chunk_size": CHUNK, "debug": self.debug, **options}
        return ms.linear_cross_entropy(hidden, self.head, target, **options)

    def tensors(self):
        yield from (self.first.detach(), self.head.detach())
        for param in (self.first, self.head):
            yield from self.optimizer.state[param].values()


@contextlib.contextmanager
def reasons():
    """A list of why gradients were whole in the block."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "memsave_ext: norm_pass")
        Model.debug = True
        try:
            yield found
        finally:
            Model.debug = False
    for warning in caught:
        assert str(warning.message).startswith(WHOLE), warning
        found.append(str(warning.message).removeprefix(WHOLE))


def train(model, steps=3, **options):
    with reasons() as found:
        for _ in range(steps):
            model.optimizer.zero_grad()
            model.loss(**options).backward()
            assert model.head.grad is None
            model.optimizer.step()
    return found


def expect_whole(found, reason):
    assert found and all(each.startswith(reason) or each == PYTHON for each in found), found


def whole(model):
    """A hook is to see the gradient."""
    model.head.register_hook(lambda grad: None)
    return model
