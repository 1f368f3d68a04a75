"""patch_causal_lm of a model whose head is sharded over the vocabulary, on two gloo ranks."""

import torch
import torch.distributed as dist
from libraries import library
from ranks import run_ranks, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memsave_ext as ms

HEADS = {
    "logits are gathered": {"output_layouts": Replicate()},
    "logits are DTensors": {"use_local_output": False},
    "tokens are sharded": {"input_layouts": Shard(1), "output_layouts": Replicate()},
    "logits are parts": {},
}


def stepped(head=None, **options):
    """Losses, other outputs and gradients of two steps, or the error."""
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=301, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(301, (2, 10), generator=torch.Generator().manual_seed(0))
    if head is not None:
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(**HEADS[head])})
    if head == "tokens are sharded":  # as layers of sequence parallelism would give them
        rank = dist.get_rank()
        model.model.norm.register_forward_hook(lambda *args: args[2].chunk(2, 1)[rank])
    patch = ms.patch_causal_lm(model, z_loss=1e-3, **options) if options else None
    found = []
    for _ in range(2):
        try:
            output = model(input_ids=ids, labels=ids)
        except (RuntimeError, ValueError) as error:
            return str(error)
        assert (output.logits is None) == (patch is not None)
        output.loss.backward()
        found += [
            output.loss.detach(),
            *(output[name].detach() for name in options.get("outputs", ())),
        ]
    if head == "tokens are sharded":  # of the rest each rank has the gradient of its tokens
        return [*found, *whole([model.lm_head.weight.grad])]
    return [*found, *whole([p.grad for p in model.parameters()])]


def head_of_its_own(**options):
    """What a model says whose head FSDP2 shards by itself."""
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=301, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(301, (2, 10), generator=torch.Generator().manual_seed(0))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.lm_head, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    losses = [model(input_ids=ids, labels=ids).loss.item()]
    ms.patch_causal_lm(model)
    try:
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    except RuntimeError as error:
        return str(error)
    return losses


def heads_of_their_own():
    return head_of_its_own(), head_of_its_own(reshard_after_forward=False)


def test_a_head_that_is_sharded_by_itself():
    library("transformers")
    for freed, (plain, patched) in run_ranks(2, [heads_of_their_own])["heads_of_their_own"]:
        assert "has freed the weight of its head, which FSDP2 shards by itself" in freed
        assert abs(plain - patched) < 1e-5


def parallel():
    outputs = "entropy", "predicted_tokens", "token_accuracy"
    found = {head: stepped(head, outputs=outputs) for head in HEADS}
    found["mean_logits"] = stepped("logits are gathered", outputs=["mean_logits"])
    return found, stepped(outputs=outputs)


def test_a_parallelized_head():
    library("transformers")
    for rank in run_ranks(2, [parallel])["parallel"]:
        assert isinstance(rank, tuple), rank
        found, right = rank
        assert "takes a part of its logits" in found.pop("logits are parts")
        assert "'mean_logits', which cannot be computed" in found.pop("mean_logits")
        last = found.pop("tokens are sharded")
        torch.testing.assert_close(last, [*right[: len(last) - 1], right[-1]])
        assert len(found) == 2
        for values in found.values():
            torch.testing.assert_close(values, right)
