"""Mistakes in the order of streams and locks, each of which the named cases must see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mistake:
    what: str
    file: str  # in csrc, or in the package
    right: str
    wrong: str
    cases: str  # words of pytest's -k, each of which must see it
    seen: str  # in the failure
    of_header: tuple[str, ...] = ()  # the sources by which a header's mistake is compiled

    @property
    def compiled(self) -> tuple[str, ...]:
        return self.of_header or (self.file,)


UNORDERED = "nothing orders the two"
FREED = "may still use"
MISTAKES = [
    Mistake(
        "a captured recompute draws from the graph's beginning",
        "checkpoint/cuda.cpp",
        "now.offset_intragraph_}",
        "0}",
        "replays",
        "assert False",
    ),
    Mistake(
        "partial sums of norms, and found_inf, are those of all streams",
        "adam/per_stream.h",
        "part.device == device && part.stream == stream",
        "part.device == device",
        "norm infinite",
        UNORDERED,
        ("adam/amp.cpp", "adam/grad_norm.cpp"),
    ),
    Mistake(
        "a gradient is freed that another stream still reads",
        "adam/backward.cpp",
        "    for (Parameter* parameter : ready) parameter->grad.record_stream(*current);\n",
        "",
        "gradients_of_several_streams",
        FREED,
    ),
    Mistake(
        "a DTensor is handed to record_stream",
        "adam/backward.cpp",
        "parameter->grad.record_stream(*current)",
        "parameter->tensor.mutable_grad().record_stream(*current)",
        "fsdp",
        "record_stream",
    ),
    Mistake(
        "a step beside FSDP2's reductions does not wait for its gradient",
        "adam/backward.cpp",
        "  order_after(beside, *made_on);\n",
        "",
        "fsdp",
        UNORDERED,
    ),
    Mistake(
        "gloo's future steps on its thread's stream",
        "memsave_ext/adam/ddp.py",
        "            with _that_backward_waits_for(stream):\n                return use(done)\n",
        "            return use(done)\n",
        "ddp",
        UNORDERED,
    ),
    Mistake(
        "gloo's future steps after autograd has waited for its stream",
        "memsave_ext/adam/ddp.py",
        "        if stream is not None:\n",
        "        if False:\n",
        "ddp",
        UNORDERED,
    ),
    Mistake(
        "a step does not wait for gloo, which was done before the hook",
        "memsave_ext/adam/ddp.py",
        "    if torch.cuda.current_stream(stream.device) not in (stream, default):",
        "    if torch.cuda.current_stream(stream.device) != default:",
        "ddp",
        UNORDERED,
    ),
    Mistake(
        "an offloaded input is copied back before its copy out has ended",
        "memsave_ext/checkpointing/offload.py",
        "    torch.cuda.current_stream(kept.device).wait_event(kept.copied)\n",
        "",
        "offloaded",
        UNORDERED,
    ),
    Mistake(
        "an offloaded input is freed before its copy out has ended",
        "memsave_ext/checkpointing/offload.py",
        "    tensor.record_stream(stream)\n",
        "",
        "offloaded",
        FREED,
    ),
    Mistake(
        "a tracker holds memory while the allocator reports",
        "memory/log.cpp",
        "  if (!device_.is_cpu()) return !older.storage.expired();\n",
        "",
        "trackers_lock",
        "the allocator is called by what it reports to",
    ),
    Mistake(
        "a captured step rounds by the number of the step that was captured",
        "adam/items.cpp",
        "item.device_step = step.const_data_ptr<float>();",
        "item.step = *step.const_data_ptr<float>() + 1;",
        "replays",
        "assert False",
    ),
]
