"""Results of operators on fake tensors lie in memory as real ones do: torch's own database of
operators, of contiguous and of transposed arguments, forward and backward."""

import itertools
import warnings

import pytest
import torch
from helpers import on_fakes
from sampling import share
from torch.utils._pytree import tree_leaves
from torch_operators import op_db

from memsave_ext import _native

pytestmark = pytest.mark.skipif(not _native.available, reason="fakes are the same in pure Python")

SAMPLES = 2
# Results that lie otherwise: gradients that take as many bytes, and what cards alone run.
OTHERWISE = {
    *("logaddexp2", "max_reduction_no_dim", "min_reduction_no_dim", "prod", "normal"),
    *("nn_functional_cross_entropy", "native_layer_norm", "nn_functional_layer_norm"),
    *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    *("nn_functional_batch_norm", "nn_functional_batch_norm_without_cudnn"),
    *("native_dropout_backward", "ormqr", "linalg_householder_product"),
    *("scatter_reduce_amin", "scatter_reduce_amax"),
}


def transposed(value):
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.layout is not torch.strided:
        return value
    made = value.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    return made.requires_grad_(value.requires_grad)


def as_it_is(value):
    return value


def cases(lie):
    for op in op_db:
        try:
            # Not by sample_inputs(), which looks through the stack and all modules for a unittest.
            samples = op.sample_inputs_func(
                op, "cpu", torch.float32, requires_grad=op.supports_autograd
            )
            samples = list(itertools.islice(samples, SAMPLES))
        except Exception:  # not for this dtype
            continue
        for sample in samples:
            yield op, sample.transform(lie)


def geometry(values):
    """Of tensors with elements: shapes, strides and dtypes."""
    tensors = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
    strided = [t for t in tensors if t.layout is torch.strided and t.numel()]
    return [(tuple(t.shape), t.stride(), t.dtype) for t in strided]


def lies(op, sample):
    """How the results and gradients lie; a text where the operator raises."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed() writes stacks down
    try:
        result = op.op(sample.input, *sample.args, **sample.kwargs)
        found = geometry(result)
        given = tree_leaves((sample.input, sample.args, sample.kwargs))
        given = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        made = [t.sum() for t in made if not t.is_complex()]
        if given and made:
            found += geometry(torch.autograd.grad(sum(made), given, allow_unused=True))
        return found
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:80]


def on_fakes_each(every):
    def inside():
        return [lies(op, sample) for op, sample in every]

    # What depends on values fails by itself there, and is left out below.
    return on_fakes(inside, forgiving=True)


@pytest.mark.parametrize("lie", share([as_it_is, transposed], 2))
def test_results_lie_as_real_ones(lie):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(cases(lie))
        real = [lies(op, sample) for op, sample in every]
        fake = on_fakes_each(every)
    compared, wrong = 0, {}
    for (op, _), one, other in zip(every, real, fake, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            continue
        compared += 1
        if one != other:
            wrong[op.formatted_name] = one, other
    assert compared > 1000
    if torch.__version__ >= (2, 12):  # of 2.11 more fakes lie otherwise
        assert not {name: lies for name, lies in wrong.items() if name not in OTHERWISE}
    for name, (one, other) in wrong.items():  # as many bytes, all the same
        assert [(s, d) for s, _, d in one] == [(s, d) for s, _, d in other], name
