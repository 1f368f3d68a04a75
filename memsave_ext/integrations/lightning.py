"""``Fit``, a callback that makes the training of a Lightning ``Trainer`` fit into a budget."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..predict.agreement import Meeting, together
from ..predict.applied import NOT_DEEPSPEED, Applied, applied_to
from ..predict.batch import LargerBatches, on_device_of
from ..predict.fit import checked_request, fitted
from ..predict.ranks import is_wrapped
from ..remat.offload import Offload

# Both are Lightning, and have classes of their own.
_NAME = "lightning.pytorch" if "lightning" in sys.modules else "pytorch_lightning"
_pytorch: Any = importlib.import_module(_NAME if _NAME in sys.modules else "lightning.pytorch")

_CLIPS = (
    "the Trainer clips gradients, by gradient_clip_val or by the module's own "
    "configure_gradient_clipping(), and a step in backward keeps no gradients to clip. Leave both "
    "out, or, in place of a gradient_clip_val of norms alone, use Fit(clip_each=True), with which "
    "the optimizer clips each parameter's gradient by its norm"
)


class Fit(_pytorch.Callback):  # type: ignore[misc]
    """Makes a Trainer's steps fit into a budget, by :func:`memsave_ext.fit`::

        trainer = pl.Trainer(callbacks=[Fit(budget="24GB")])
        trainer.fit(net, batches)

    It predicts ``training_step()`` with the first batch, and applies the cheapest technique that
    fits before it runs. Precision, gradient accumulation and a GradScaler are the Trainer's, and
    states that were loaded by ``ckpt_path`` are converted. Checkpoints have states as torch's
    optimizer has them. What ``training_step()`` logs while it is predicted goes nowhere. When
    ``fit()`` ends, or raises, nothing steps in backward any more.

    With several processes it is the same line, by the strategies ``"ddp"`` and
    ``ModelParallelStrategy``, with which ``configure_model()`` shards by FSDP2: all processes take
    one technique, and the first alone prints and warns.

    Args:
        budget, technique, others, offload, verbose, timeout, means: as of
            :func:`memsave_ext.fit`.
        in_backward: as of :func:`memsave_ext.fit`. Say False where a callback or the module looks
            at gradients or changes them.
        largest: the largest batch of the training, as ``training_step()`` gets it; the step is
            predicted with it in place of the first batch. Without it, a UserWarning says where a
            batch is larger than the first.
        clip_each: whether an optimizer that steps in backward clips each parameter's gradient to
            the norm ``gradient_clip_val``, in place of the norm of all. Otherwise, where the
            Trainer clips, nothing is stepped in backward, and gradients that do not fit lie
            elsewhere until they are stepped.

    Attributes:
        fitted: what :func:`memsave_ext.fit` returned; None before the first step.

    Raises:
        TypeError, ValueError: ``budget``, ``technique``, ``offload`` or ``timeout`` is not as said
            there.
        ValueError: at the first step: several processes train the model by another strategy; it
            has several optimizers, or optimizes by itself; and as :func:`memsave_ext.fit`.
        torch.OutOfMemoryError: at the first step: nothing fits.
    """

    def __init__(
        self,
        budget: str | int,
        *,
        technique: str | None = None,
        in_backward: bool = True,
        largest: Any = None,
        clip_each: bool = False,
        others: Iterable[nn.Module | Tensor] = (),
        offload: Offload | None = None,
        verbose: bool = True,
        timeout: float | None = None,
        means: str | None = None,
    ) -> None:
        self.fitted: Applied | None = None
        self._budget, self._options = checked_request(
            budget, in_backward=in_backward, technique=technique, means=means, others=others,
            offload=offload, verbose=verbose, timeout=timeout,
        )  # fmt: skip
        self._largest = largest
        self._larger: LargerBatches | None = None
        self._clip_each = clip_each
        self._clip_val: float | None = None  # the Trainer's, while the optimizer clips
        self._micro_batches = 1  # of a step that was predicted

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """An earlier run's optimizer lets go of the parameters."""
        before = applied_to(pl_module)
        if stage == "fit":
            if before is not None:
                before.undo()
            self.fitted = None  # and those of an earlier module may go

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        before = applied_to(pl_module)
        # GradientAccumulationScheduler may change it: gradients that add up take memory.
        adds_up = trainer.accumulate_grad_batches > 1 >= self._micro_batches
        is_fitted = before is not None and any(o is before.optimizer for o in trainer.optimizers)
        if is_fitted and not adds_up:
            if self._larger is not None:
                self._larger.look(batch)
            return
        if before is not None:
            before.undo()  # also where lr_find has trained with another optimizer
        self._give_clipping_back(trainer)
        self._micro_batches = trainer.accumulate_grad_batches
        with together("Fit", trainer.strategy.model) as meeting:
            self._fit(trainer, pl_module, batch, batch_idx, meeting)

    def _fit(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, meeting: Meeting | None
    ) -> None:
        optimizer = _the_optimizer(trainer, pl_module)
        trained = trainer.strategy.model  # the module, or DistributedDataParallel around it
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        own = type(pl_module).configure_gradient_clipping
        is_own = own is not _pytorch.LightningModule.configure_gradient_clipping
        clips = bool(trainer.gradient_clip_val) or is_own
        each = clips and not is_own and self._clip_each and by_norm

        def loss(model: Any, batch: Any) -> Tensor:
            net = model.module if isinstance(model, DistributedDataParallel) else model
            net.__dict__.update(_trainer=trainer, log=_nothing, log_dict=_nothing)
            with trainer.precision_plugin.train_step_context():
                return _loss_of(trainer, model, net, batch, batch_idx)

        is_largest = self._largest is not None
        predicted = on_device_of(pl_module, self._largest) if is_largest else batch
        self.fitted = fitted(
            trained,
            optimizer,
            predicted,
            self._budget,
            meeting,
            is_largest=is_largest,
            micro_batches=self._micro_batches,
            forward=loss,
            keeps_gradients=True,  # it zeroes them after training_step()
            method="training_step",
            options={
                "accumulate_when": lambda: _goes_on(trainer),
                "max_grad_norm": trainer.gradient_clip_val if each else None,
                "grad_scaler": getattr(trainer.precision_plugin, "scaler", None),
            },
            **self._options | ({"refused": _CLIPS} if clips and not each else {}),
        )
        self._larger = LargerBatches(predicted) if self.fitted.warns else None
        if self._larger is not None:
            self._larger.look(batch)
        if each and self.fitted.steps_in_backward:
            self._clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.fitted is not None:
            self.fitted.rest()
        self._give_clipping_back(trainer)

    def _give_clipping_back(self, trainer: Any) -> None:
        if self._clip_val is not None:
            trainer.gradient_clip_val, self._clip_val = self._clip_val, None


def _the_optimizer(trainer: Any, pl_module: Any) -> Any:
    if trainer.world_size > 1 and not is_wrapped(trainer.strategy.model):
        strategy = type(trainer.strategy).__name__
        if "DeepSpeed" in strategy:
            raise ValueError(f"Fit: {NOT_DEEPSPEED}. FSDP2 is ModelParallelStrategy")
        raise ValueError(
            f"Fit: {trainer.world_size} processes train the module by {strategy}, and it is not "
            "in DistributedDataParallel, nor sharded by FSDP2. Use strategy='ddp', or "
            "ModelParallelStrategy with a configure_model() that calls fully_shard()"
        )
    if not pl_module.automatic_optimization:
        raise ValueError(
            "Fit: the module optimizes by itself (automatic_optimization=False), which Fit cannot "
            "follow: call memsave_ext.fit() where the module makes its optimizer"
        )
    # Of a module that configures none, Lightning makes one that stands in.
    real = [o for o in trainer.optimizers if type(o).__name__ != "_MockOptimizer"]
    if len(real) != 1:
        raise ValueError(f"Fit: the module must have one optimizer, got {len(real)}")
    return real[0]


def _loss_of(trainer: Any, model: Any, net: Any, batch: Any, batch_idx: int) -> Tensor:
    names = inspect.signature(net.training_step).parameters
    arguments = (batch, batch_idx) if len(names) > 1 else (batch,)
    if model is net:
        output = net.training_step(*arguments)
    else:
        redirect = trainer.strategy._forward_redirection
        output = redirect(model, net, "training_step", *arguments)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step() must return a loss, or a dict with one, got {type(output).__name__}"
        )
    return loss


def _goes_on(trainer: Any) -> bool:
    """Whether the present backward is not the last of its step."""
    last = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
    return not last and not trainer.is_last_batch


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a copy's ``log()``."""
