"""Other models beside the one that is trained: what a loss reaches, and what is named."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memsave_ext as ms


def mlp(width=64):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(width)
    del norm.num_batches_tracked  # which is not read in eval mode
    norm.num_batches_tracked = None
    blocks = [nn.Linear(width, width), norm, nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*blocks, *(nn.GELU(), nn.Linear(width, width)) * 3)


def loop(width=64):
    model = mlp(width)
    return model, torch.optim.AdamW(model.parameters()), torch.ones(16, width)


def size(*modules):
    return sum(t.nbytes for m in modules for t in (*m.parameters(), *m.buffers()))


def peak_of(models, model, optimizer, batch, loss):
    """Of the second step, with all of ``models`` counted."""
    for _ in range(2):
        with ms.memory.track(nn.ModuleList(models), optimizer) as t:
            loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return t.peak


def against(teacher):
    def loss(y, batch):
        with torch.no_grad():
            wanted = teacher(batch)
        return F.mse_loss(y, wanted)

    return loss


def test_what_the_loss_reaches_counts():
    model, optimizer, batch = loop()
    teacher = copy.deepcopy(model).eval()
    loss = against(teacher)
    predicted = ms.memory.predict(model, optimizer, batch, loss=loss)
    assert predicted.others == size(teacher)
    tracked = peak_of([model, teacher], model, optimizer, batch, loss)
    assert abs(predicted.peak - tracked) <= 16  # a loop holds some single numbers more
    assert predicted.at_peak["other"] >= size(teacher)


def test_shared_weights_and_what_is_no_module_count_once_and_not():
    model, optimizer, batch = loop()
    head = nn.Linear(64, 64)
    head.weight = model[0].weight  # the model's own
    targets = torch.zeros(16, 64)  # no model's, as a batch

    def loss(y):
        return F.mse_loss(head(y), targets)

    predicted = ms.memory.predict(model, optimizer, batch, loss=loss)
    assert predicted.others == head.bias.nbytes


def test_what_is_named_counts():
    model, optimizer, batch = loop()
    average = copy.deepcopy(model)
    held = torch.zeros(1000)

    def predict(others=()):
        return ms.memory.predict(model, optimizer, batch, loss=torch.mean, others=others)

    plain, more = predict(), predict([average, held, held[10:], model])
    assert plain.others == 0
    assert more.others == size(average) + held.nbytes
    assert more.peak == plain.peak + more.others


@pytest.mark.parametrize("others", [None, "all", nn.Linear(1, 1), [3], torch.ones(1)])
def test_a_list_of_modules_and_tensors_is_wanted(others):
    model, optimizer, batch = loop()
    for predict in (ms.memory.predict, ms.fit):
        more = {"budget": "1GB"} if predict is ms.fit else {}
        with pytest.raises(TypeError, match="others must be a list of modules and tensors, got"):
            predict(model, optimizer, batch, loss=torch.mean, others=others, **more)
    with pytest.raises(TypeError, match="optimizer, batch, loss and others can be passed only"):
        ms.memory.predict(loop, others=[model])


@pytest.mark.skipif(not ms._native.available, reason="remat is what fits")
@pytest.mark.usefixtures("few_techniques")
@pytest.mark.parametrize("named", [False, True])
def test_fit_leaves_room_for_them(named):
    """Its budget is for all, also where remat keeps to what is left of it."""
    plain, optimizer, batch = loop(256)
    batch = torch.ones(2048, 256)
    teacher = copy.deepcopy(plain).eval()
    reached, others = (torch.mean, [teacher]) if named else (against(teacher), ())
    loss = (lambda y, _: y.mean()) if named else reached
    whole = ms.memory.predict(plain, optimizer, batch, loss=loss, others=others)
    assert whole.others == size(teacher)
    budget = whole.peak - size(teacher) // 2  # without the teacher all would fit
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the measured peak is not the predicted one
        fitted = ms.fit(plain, optimizer, batch, budget=budget, loss=loss, others=others)
        assert fitted.technique != "as built"
        assert fitted.predicted <= budget
        assert peak_of([plain, teacher], plain, optimizer, batch, loss) <= budget * 1.001
    assert abs(fitted.measured / fitted.predicted - 1) <= 0.02


@pytest.mark.skipif(not ms._native.available, reason="budgets of remat")
def test_a_budget_of_remat_is_what_is_left():
    model, optimizer, batch = loop(256)
    batch = torch.ones(2048, 256)
    teacher = copy.deepcopy(model).eval()
    loss = against(teacher)
    within = "remat within the budget"
    budget = int(0.8 * ms.memory.predict(model, optimizer, batch, loss=loss).peak)
    fitted = ms.fit(model, optimizer, batch, budget=budget, loss=loss, technique=within)
    assert fitted.predicted <= budget
    assert peak_of([model, teacher], model, optimizer, batch, loss) <= budget * 1.02
    fitted.undo()
