"""How far predicted peaks are from tracked ones: memory.predict() against memory.track().

The same steps on fake and on real memory, on the CPU at small sizes: this project's models, and
those of timm and transformers where these are installed; each plain, with checkpointed blocks, with
Adam in backward, and with its 8-bit states. Nothing is timed.

    python benchmarks/predict.py --every 1 --save benchmarks/results    # all models: five minutes
"""

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memsave_ext as ms
from memsave_ext.predict.techniques import Techniques
from memsave_ext.shared.table import format_bytes, print_table
from shared.adam_methods import VisionTransformer
from shared.common import Rows, machine, parser_of, write_record
from shared.models import DenseNet

MODES = {
    "plain": Techniques(),
    "checkpoint": Techniques(checkpoint=True),
    "in backward": Techniques(adam_in_backward=True),
    "8-bit states": Techniques(adam_in_backward=True, state_dtype="8bit"),
}
TIMM = (
    *("resnet18", "resnext26ts", "skresnet18", "regnetx_002", "regnety_002", "densenet121"),
    *("mobilenetv2_100", "mobilenetv3_small_100", "lcnet_050", "ghostnet_100", "rexnet_100"),
    *("efficientnet_b0", "tf_efficientnet_lite0", "convnext_atto", "convnextv2_atto"),
    *("repvgg_a0", "repvit_m0_9", "edgenext_xx_small", "poolformer_s12", "mobilevit_xxs"),
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "cait_xxs24_224", "coat_tiny"),
    *("xcit_nano_12_p16_224", "pvt_v2_b0", "tiny_vit_5m_224", "swin_tiny_patch4_window7_224"),
    *("mixer_s32_224", "gmlp_ti16_224"),
)
TRANSFORMERS = (
    *("llama", "mistral", "qwen2", "gemma", "phi", "gpt2", "gpt_neox", "opt"),
    *("bert", "roberta"),
)
WIDTH = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2000}
OTHER_NAMES = {"n_embd": 256, "n_layer": 4, "n_head": 4, "intermediate_size": 512, "ffn_dim": 512}


def cases(batch: int = 8) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields models by name; ``batch``: images of each step."""
    yield "DenseNet", lambda: images(DenseNet(22, 12), 32, batch)
    yield (
        "VisionTransformer",
        lambda: images(VisionTransformer(64, width=192, heads=3, depth=6), 64, batch),
    )
    if library("timm"):
        for name in TIMM:
            yield f"timm {name}", lambda name=name: images(timm_model(name), 64, batch)
    if library("transformers"):
        for name in TRANSFORMERS:
            yield f"transformers {name}", lambda name=name: tokens(name)


def library(name: str) -> Any:
    """Imports a library, None if it is not installed. A torchvision made for CUDA, which others
    import, needs operators to be declared beside a torch for CPUs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    global _operators
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        _operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(name)


_operators: Any = None  # kept, as its declarations end with it


def timm_model(name: str) -> nn.Module:
    timm = library("timm")
    try:
        model: nn.Module = timm.create_model(name, num_classes=10, img_size=64)
    except TypeError:
        model = timm.create_model(name, num_classes=10)
    return model


def images(model: nn.Module, size: int, batch: int) -> Any:
    x, labels = torch.randn(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
    return stepped(model, lambda: F.cross_entropy(model(x), labels))


def tokens(name: str) -> Any:
    transformers = library("transformers")
    config = transformers.AutoConfig.for_model(name, **WIDTH)
    for key, value in OTHER_NAMES.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = 4
    masked = name in ("bert", "roberta")
    kind = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model = kind.from_config(config).train()
    batch = torch.ones(4, 128, dtype=torch.long) * 5
    return stepped(model, lambda: model(input_ids=batch, labels=batch).loss)


def stepped(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def compare(build: Callable[[], Any], techniques: Techniques) -> dict[str, Any]:
    built = techniques.applied(build)
    try:
        model, optimizer, step = built()
        step()
        with ms.memory.track(model, optimizer) as track:
            step()
        del model, optimizer, step
        gc.collect()
        predicted = ms.memory.predict(built)
    except (ValueError, RuntimeError) as error:
        return {"reason": str(error).partition("\n")[0]}
    phases = [predicted.peak_phase, track.peak_phase]
    return {"predicted": predicted.peak, "tracked": track.peak, "phases": phases}


def error_of(row: dict[str, Any]) -> float:
    return float(row["predicted"] / row["tracked"] - 1)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only models named like this")
    parser.add_argument("--every", type=int, default=4, help="of so many models one is taken")
    options = parser.parse_args(arguments)
    settings = {"only": options.only, "every": options.every, "modes": list(MODES)}
    record: dict[str, Any] = {"machine": machine(), "settings": settings}
    rows = Rows(options.save, "predict", record)
    for number, (name, build) in enumerate(cases()):
        if options.only in name and number % options.every == 0:
            for mode, techniques in MODES.items():
                torch.manual_seed(0)
                rows.append({"model": name, "mode": mode, **compare(build, techniques)})
            if options.progress:
                print(f"{name} done", file=sys.stderr, flush=True)
    shown = [
        (
            row["model"],
            row["mode"],
            *map(format_bytes, (row["predicted"], row["tracked"])),
            f"{error_of(row):+.2%}",
            " / ".join(dict.fromkeys(row["phases"])),
        )
        if "tracked" in row
        else (row["model"], row["mode"], "-", "-", row["reason"][:60], "-")
        for row in rows
    ]
    print_table("", ["model", "mode", "predicted", "tracked", "error", "in"], shown)
    errors = [abs(error_of(row)) for row in rows if "tracked" in row]
    within = [sum(e <= limit for e in errors) / max(len(errors), 1) for limit in (0.02, 0.05)]
    print(f"{len(errors)} steps: within 2 %: {within[0]:.0%}, within 5 %: {within[1]:.0%}")
    print(write_record(options.save, "predict", {**record, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
