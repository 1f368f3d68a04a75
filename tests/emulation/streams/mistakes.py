"""Mistakes in the order of streams and locks, each of which the named cases must see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mistake:
    what: str
    file: str  # in csrc, or in the package
    right: str
    wrong: str
    cases: str  # words of pytest's -k
    seen: str  # in the failure
    of_header: tuple[str, ...] = ()  # the sources by which a header's mistake is compiled

    @property
    def compiled(self) -> tuple[str, ...]:
        return self.of_header or (self.file,)


UNORDERED = "nothing orders the two"
FREED = "may still use"
MISTAKES = [
    Mistake(
        "partial sums of a norm are read without waiting for their streams",
        "adam/per_stream.h",
        "      use_here(part.tensor, part.stream);\n",
        "",
        "norm",
        UNORDERED,
        ("adam/grad_norm.cpp",),
    ),
    Mistake(
        "found_inf is zeroed on one stream and set on others",
        "adam/per_stream.h",
        "part.device == device && part.stream == stream",
        "part.device == device",
        "infinite",
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
        "gradients are used on a stream that does not wait for theirs",
        "adam/backward.cpp",
        "    order_after(*current, *bucket.stream);\n",
        "",
        "gradients_of_several_streams",
        UNORDERED,
    ),
]
