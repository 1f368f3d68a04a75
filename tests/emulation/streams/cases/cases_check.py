"""The check of a build on the device: kernels beside pure Python, training beside plain torch."""

import pytest
import torch

from memsave_ext.check import __main__ as check
from memsave_ext.check import kernels, training


@pytest.fixture
def few_rows(monkeypatch, capsys):
    """Of each operator one format, and small tensors; (exit status, what it says)."""
    monkeypatch.setattr(kernels, "_SHAPES_CUDA", [(48, 3, 16, 16)])
    one_of_each = {k.operator: k for k in kernels.KERNELS if "fp32" in k.what}
    monkeypatch.setattr(check, "KERNELS", list(one_of_each.values()))
    monkeypatch.setattr(training, "_STEPS", 3)

    def run():
        return check.main(["--quick"]), capsys.readouterr().out

    return run


def test_nothing_is_wrong(few_rows):
    status, said = few_rows()
    rows = said.partition("cuda:0\n")[2].splitlines()
    assert status == 0, said
    assert {row.split(" ")[0] for row in rows} >= {*kernels_of_rooms(), *training.RUNS}


def kernels_of_rooms():
    return {kernel.part for kernel in check.KERNELS}


def test_launches_that_fail(few_rows, monkeypatch):
    monkeypatch.setenv("MEMSAVE_EXT_LAUNCHES_FAIL", "1")
    status, said = few_rows()
    assert status == 1
    assert "MEMSAVE_EXT_DISABLE=adam" in said
    assert ",loss_head.cuda," in said
    assert "cannot be launched" in said


def test_a_launch_that_fails_names_the_check(monkeypatch):
    logits, target = torch.randn(3, 5, device="cuda"), torch.zeros(3, dtype=torch.int64)
    sums = torch.zeros(3, 3, device="cuda")
    monkeypatch.setenv("MEMSAVE_EXT_LAUNCHES_FAIL", "1")
    with pytest.raises(RuntimeError, match="cannot be launched.*`python -m memsave_ext.check`"):
        torch.ops.memsave_ext.linear_cross_entropy_reduce_(
            sums, logits, target.to("cuda"), None, None, 0, 1.0, 0.0, 0.0
        )
