"""Within a budget the system counts no more memory for the process than the budget and what was
there before: what is freed is found again."""

import pytest
from processes import run_program

import memsave_ext as ms

_PROGRAM = """
import torch, memsave_ext as ms
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
numel, layers = {numel}, {layers}

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
    def forward(self, x):
        return x + F.gelu(x * self.scale) * torch.sigmoid(x + self.shift)

def resident(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) << 10

model = nn.Sequential(*[Layer() for _ in range(layers)])
handle = ms.remat_module(model, budget={budget})
model(torch.randn(1 << 18)).sum().backward()
x = torch.randn(numel)
before = resident("VmRSS:")
for _ in range(4):
    model(x).square().mean().backward()
print(resident("VmHWM:") - before, max(handle.budget, handle.least))
"""


@pytest.mark.skipif(not ms._native.available, reason="budgets need the native part")
@pytest.mark.parametrize(("kib", "layers"), [(64, 400), (1 << 10, 40), (8 << 10, 16)])
def test_the_peak_of_the_process(kib, layers):
    numel = kib << 8
    budget = layers * 4 * kib * 1024 // 4  # of what a step keeps
    done = run_program(_PROGRAM.format(numel=numel, layers=layers, budget=budget))
    assert done.returncode == 0, done.stderr
    grown, promised = map(int, done.stdout.split())
    assert grown <= 1.1 * promised + (4 << 20), (grown >> 20, promised >> 20)
