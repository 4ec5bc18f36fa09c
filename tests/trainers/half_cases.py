"""Mixed precision by the switch that each trainer has for it.

On a CPU accelerate leaves fp16 out and Lightning takes bf16 for it; `as_on_a_gpu` turns accelerate's on.
"""

from typing import Any

import torch

from tests.trainers.case import BATCH, STEPS, Numbers, Work, llama, rows, stacked
from tests.trainers.cases import accuracy, in_order, losses_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def hf_trainer_bf16(work: Work) -> Numbers:
    """transformers `Trainer` with `bf16=True`: train, evaluate"""
    return _by_trainer(work, "bf16")


def hf_trainer_fp16(work: Work) -> Numbers:
    """transformers `Trainer` with `fp16=True` and GradScaler, as on a GPU: train, evaluate"""
    return _by_trainer(work, "fp16")


def _by_trainer(work: Work, precision: str) -> Numbers:
    from transformers import Trainer, TrainingArguments

    train_rows, size, mesh = rows(), BATCH // work.num_ranks, work.mesh
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names, kwargs=stacked(train_rows[:size]))
    options: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-3}
    options |= {"logging_steps": 1, "max_steps": STEPS, "save_strategy": "no", precision: True}
    args = TrainingArguments(work.path("half"), per_device_train_batch_size=size, **options)
    trainer = Trainer(model, args, train_dataset=train_rows, eval_dataset=rows(16, seed=3))
    as_on_a_gpu(trainer.accelerator)
    trainer.train()
    numbers = {"losses": losses_of(trainer), "eval_loss": trainer.evaluate()["eval_loss"]}
    return numbers | {"is half": is_half(trainer.model(**stacked(train_rows[:size])).logits, DTYPES[precision])}


def as_on_a_gpu(accelerator: Any) -> None:
    """Turn on what accelerate leaves out for fp16 on CPUs: autocast, and GradScaler."""
    if accelerator.mixed_precision == "fp16":
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=1024.0)


def is_half(logits: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all logits, which trainers convert to float32, are numbers of the lower precision."""
    return bool((logits.to(dtype).to(logits.dtype) == logits).all())


def accelerate_bf16(work: Work) -> Numbers:
    """`Accelerator(mixed_precision="bf16")`: prepare, backward, clip_grad_norm_, gather_for_metrics, unwrap_model"""
    return _by_accelerate(work, "bf16")


def accelerate_fp16(work: Work) -> Numbers:
    """`Accelerator(mixed_precision="fp16")` with GradScaler, as on a GPU: the same"""
    return _by_accelerate(work, "fp16")


def _by_accelerate(work: Work, precision: str) -> Numbers:
    from accelerate import Accelerator

    accelerator, mesh, all_rows = Accelerator(mixed_precision=precision), work.mesh, rows(BATCH * STEPS)
    as_on_a_gpu(accelerator)
    part = stacked(all_rows[: BATCH // work.num_ranks])
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names, kwargs=part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(all_rows, batch_size=len(part["labels"]), collate_fn=stacked)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        output = model(**batch)
        accelerator.backward(output.loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    numbers = {"losses": losses, "right": accuracy(accelerator, model.eval(), loader)}
    halves = [is_half(model(**batch).logits, DTYPES[precision])]
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    halves.append(is_half(bare(**batch).logits, DTYPES[precision]))
    return numbers | {"is half: prepared, unwrapped": torch.tensor(halves)}


def lightning_trainer_bf16(work: Work) -> Numbers:
    """Lightning `Trainer(precision="bf16-mixed")`: fit, validate"""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    autopar, all_rows, (dp, tp) = work.autopar, rows(BATCH * STEPS), work.sizes
    part = stacked(all_rows[: BATCH // dp])
    losses: list[float] = []
    dtypes = set()

    class Llama(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.is_compiled = llama(), False

        def configure_model(self) -> None:
            if not self.is_compiled and work.num_ranks > 1:
                self.model = autopar.compile(self.model, self.device_mesh, batch=("data_parallel",), kwargs=part)
            self.is_compiled = True

        def training_step(self, batch: Any) -> torch.Tensor:
            output = self.model(**batch)
            losses.append(output.loss.item())
            dtypes.add(output.logits.dtype)
            return output.loss

        def validation_step(self, batch: Any) -> None:
            self.log("eval_loss", self.model(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    on: dict[str, Any] = {"devices": 1}
    if work.num_ranks > 1:
        on = {"strategy": ModelParallelStrategy(data_parallel_size=dp, tensor_parallel_size=tp), "devices": dp * tp}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "default_root_dir": work.folder}
    trainer = lightning.Trainer(accelerator="cpu", precision="bf16-mixed", max_steps=STEPS, **on, **quiet)
    model, loader = Llama(), in_order(all_rows, work)
    trainer.fit(model, loader)
    evaluated = trainer.validate(model, loader, verbose=False)[0]["eval_loss"]
    return {"losses": losses, "eval_loss": evaluated, "is half": dtypes == {torch.bfloat16}}


def fabric_bf16(work: Work) -> Numbers:
    """Lightning `Fabric(precision="bf16-mixed")`: setup, backward, clip_gradients"""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    all_rows, (dp, tp) = rows(BATCH * STEPS), work.sizes
    part = stacked(all_rows[: BATCH // dp])

    def parallelize(model: Any, mesh: Any) -> Any:
        return work.autopar.compile(model, mesh, batch=("data_parallel",), kwargs=part)

    on: dict[str, Any] = {"devices": 1}
    if work.num_ranks > 1:
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=dp, tensor_parallel_size=tp)
        on = {"strategy": strategy, "devices": dp * tp}
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed", **on)
    fabric.launch()
    loader = torch.utils.data.DataLoader(all_rows, batch_size=BATCH // dp, collate_fn=stacked)
    loader = fabric.setup_dataloaders(loader)
    model = fabric.setup_module(llama())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch in loader:
        output = model(**batch)
        fabric.backward(output.loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    return {"losses": losses, "is half": is_half(output.logits, torch.bfloat16)}
