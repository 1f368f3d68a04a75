"""Weights in managed memory: where they are when work uses them, and how many are on the device."""

import gc

import fake_cuda
import pytest
import torch
from elsewhere.test_weights_cuda import WIDTH, Layer, data, network, train
from on_device import capture

import memsave_ext as ms


@pytest.mark.parametrize("wrap", ["plain", "checkpoint", "budget"])
def test_weights_are_there_when_they_are_used(wrap):
    gc.collect()  # of other tests
    net = network()
    weights = ms.weights_on(net, "cpu")
    if wrap == "checkpoint":
        ms.checkpoint_modules(net, Layer)
    if wrap == "budget":
        ms.remat_module(net, budget=0.7)
    optimizer = ms.AdamW(net.parameters(), in_backward=True)
    train(net, optimizer)
    fake_cuda.take_faults(), fake_cuda.take_most_managed()
    train(net, optimizer, 2, 3)
    size = WIDTH * WIDTH * 4
    assert fake_cuda.take_faults() == 0
    assert 2 * size <= fake_cuda.take_most_managed() <= 4 * size
    weights.let_go()
    assert net[0].layer.weight.sum().item() != 0  # read in the host's memory
    assert fake_cuda.take_faults() == 1


def test_weights_of_a_graph_stay_where_they_are():
    net = network().eval()  # of which half may be on the device
    ms.weights_on(net, "cpu")
    x = data()
    with torch.no_grad():
        capture(lambda: net(x), warmup=1)
