"""Log-probabilities of tokens, also with entropies, and divergences of two heads: peak memory and
time of forward and backward, beside torch's operators with whole logits, and Liger's chunks of
tokens.

Peaks are above inputs and weights, as multiples of one head's logits. Times are the process's CPU
time on one thread, and those of torch in the same round. Liger's Triton kernels need a GPU; what
runs here is its chunked loss, in eager mode, which is torch's operators on chunks of 1024 tokens.
It has no log-probabilities by themselves. The loss with entropies has a bonus for them, so that
they are differentiated, too.

    python benchmarks/linear_kl.py --shapes 4 --save benchmarks/results
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import memsave_ext as ms
from shared.common import (
    Rows,
    balanced_order,
    bar,
    figure,
    machine,
    median_and_spread,
    parser_of,
    settings_of,
    show_bars,
    show_left_out,
    write_record,
)

SHAPES = ((1024, 128, 8000), (1024, 256, 32000), (4096, 64, 8000), (256, 1024, 8000))
TINY = ((64, 16, 3000),)
BETAS = {0.0: "KL(teacher || student)", 1.0: "KL(student || teacher)", 0.5: "Jensen-Shannon"}
TORCH, OURS, LIGER = "torch", "memsave_ext", "Liger, chunks of tokens"
LOG_PROBS = "log-probabilities"
ENTROPY = "log-probabilities and entropies"
BONUS = 0.01  # times the mean entropy
# Most of a head's logits, and most of the time of torch's operators.
BARS = (0.5, 2.0)
ENTROPY_BAR = 1.15  # of the time of log-probabilities alone


def liger() -> Any:
    """Returns Liger's loss, or the reason why it is not there."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError as error:
        return f"cannot be imported: {error}"
    return LigerFusedLinearJSDLoss


def kl_by_torch(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Returns the divergences of logits, as of :func:`memsave_ext.linear_kl`."""
    a, b = student.log_softmax(-1), teacher.log_softmax(-1)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    if beta in (0.0, 1.0):
        return kl(a, b) if beta else kl(b, a)
    mixed = torch.logaddexp(a + torch.tensor(1 - beta).log(), b + torch.tensor(beta).log())
    return beta * kl(b, mixed) + (1 - beta) * kl(a, mixed)


def cases(tokens: int, features: int, classes: int) -> dict[tuple[str, str], Callable[[], Tensor]]:
    """A function for each loss and who computes it, which runs forward and backward and returns
    the loss."""
    torch.manual_seed(0)
    x, teacher_x = torch.randn(tokens, features), torch.randn(tokens, features)
    weight, teacher_weight = (torch.randn(classes, features) * features**-0.5 for _ in range(2))
    x.requires_grad_(), weight.requires_grad_()
    target = torch.randint(classes, (tokens,))

    def run(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def step() -> Tensor:
            x.grad = weight.grad = None
            made = loss()
            made.backward()
            return made.detach()

        return step

    def gathered() -> Tensor:
        return F.linear(x, weight).log_softmax(-1).gather(-1, target[:, None]).mean()

    def with_entropy_by_torch() -> Tensor:
        log_p = F.linear(x, weight).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, target[:, None]).mean() + BONUS * entropy.mean()

    def with_entropy() -> Tensor:
        log_probs, entropy = ms.linear_log_probs(x, weight, target, return_entropy=True)
        loss: Tensor = log_probs.mean() + BONUS * entropy.mean()
        return loss

    found: dict[tuple[str, str], Callable[[], Tensor]] = {
        (LOG_PROBS, TORCH): run(gathered),
        (LOG_PROBS, OURS): run(lambda: ms.linear_log_probs(x, weight, target).mean()),
        (ENTROPY, TORCH): run(with_entropy_by_torch),
        (ENTROPY, OURS): run(with_entropy),
    }
    kernel = liger()
    for beta, name in BETAS.items():

        def plain(beta: float = beta) -> Tensor:
            with torch.no_grad():
                of_teacher = F.linear(teacher_x, teacher_weight)
            return kl_by_torch(F.linear(x, weight), of_teacher, beta).mean()

        def ours(beta: float = beta) -> Tensor:
            return ms.linear_kl(x, weight, teacher_x, teacher_weight, beta=beta).mean()

        found[name, TORCH], found[name, OURS] = run(plain), run(ours)
        if not isinstance(kernel, str):
            loss = kernel(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)

            def theirs(loss: Any = loss) -> Tensor:
                made: Tensor = loss(x, weight, teacher_x, teacher_weight, target)
                return made

            found[name, LIGER] = run(theirs)
    return found


def measure(shape: tuple[int, int, int], rounds: int, progress: bool) -> list[dict[str, Any]]:
    tokens, _, classes = shape
    of = cases(*shape)
    peaks, losses = {}, {}
    for key, run in of.items():
        run()
        with ms.memory.track() as track:
            losses[key] = run()
        peaks[key] = track.peak
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in of}
    keys = {" / ".join(key): key for key in of}
    for round_ in bar(range(rounds), show=progress):
        for name in balanced_order(list(keys), round_):
            start = time.process_time()
            of[keys[name]]()
            seconds[keys[name]].append(time.process_time() - start)
    rows = []
    for (loss, who), taken in seconds.items():
        # All compute one loss.
        torch.testing.assert_close(losses[loss, who], losses[loss, TORCH], rtol=1e-3, atol=1e-4)
        ratios = [a / b for a, b in zip(taken, seconds[loss, TORCH], strict=True)]
        row = {
            "loss": loss,
            "case": who,
            "tokens": shape[0],
            "features": shape[1],
            "classes": shape[2],
            "peak_bytes": peaks[loss, who],
            "of_logits": peaks[loss, who] / (4 * tokens * classes),
            "seconds": median_and_spread(taken)[0],
            "of_torchs": median_and_spread(ratios)[0],
        }
        if (loss, who) == (ENTROPY, OURS):
            alone = zip(taken, seconds[LOG_PROBS, OURS], strict=True)
            row["of_log_probs"] = median_and_spread([a / b for a, b in alone])[0]
        rows.append(row)
    return rows


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        if row["case"] == OURS:
            shape = "x".join(str(row[name]) for name in ("tokens", "features", "classes"))
            values = {"peak, of the logits": row["of_logits"], "time, of torch's": row["of_torchs"]}
            for (what, value), most in zip(values.items(), BARS, strict=True):
                name = f"{row['loss']}, {shape}: {what}"
                found.append(figure(name, value, most))
            if (value := row.get("of_log_probs")) is not None:
                name = f"{row['loss']}, {shape}: time, of that without entropies"
                found.append(figure(name, value, ENTROPY_BAR))
    return found


def line_of(row: dict[str, Any]) -> str:
    shape = f"{row['tokens']} x {row['features']} x {row['classes']}"
    time = f"{row['seconds'] * 1e3:8.1f}ms{row['of_torchs']:8.2f}"
    return f"{shape:22}{row['loss']:34}{row['case']:26}{row['of_logits']:10.2f}{time}"


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", type=int, default=1, help="how many of them; there are 4")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "machine": machine("cpu"),
        "settings": settings_of(options, "rounds", "tiny"),
    }
    if isinstance(reason := liger(), str):
        record["left_out"] = {"liger-kernel": reason}
        show_left_out(record["left_out"])
    print(f"{'tokens x features x classes':82}{'peak/logits':>10}{'CPU time':>10}{'/torch':>8}")
    rows = Rows(options.save, "linear_kl", record, line=line_of)
    for shape in TINY if options.tiny else SHAPES[: options.shapes]:
        for row in measure(shape, options.rounds, options.progress):
            rows.append(row)
    record |= {"rows": rows, "bars": bars(rows)}
    show_bars(record["bars"])
    print(write_record(options.save, "linear_kl", record))


if __name__ == "__main__":
    main()
