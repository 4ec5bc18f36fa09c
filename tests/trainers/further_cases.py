"""More of what people ask of trainers: accumulation, schedules, the best checkpoint, classifiers, adapters, options."""

from typing import Any

import torch

from tests.trainers.case import BATCH, LENGTH, WORDS, Numbers, Work, llama, rows, stacked
from tests.trainers.cases import in_order, losses_of

FEW = 6  # steps
OPTIONS: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2}
OPTIONS |= {"logging_steps": 1, "max_steps": FEW}


def hf_trainer_options(work: Work) -> Numbers:
    """transformers `Trainer`: accumulation, a schedule, max_grad_norm, evaluation meanwhile, the best model, predict"""
    from transformers import Trainer, TrainingArguments

    train_rows, eval_rows, size, mesh = rows(), rows(13, seed=3), BATCH // work.num_ranks, work.mesh
    options = OPTIONS | {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
    options |= {"warmup_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    options |= {"load_best_model_at_end": True, "save_only_model": True, "per_device_train_batch_size": size}
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names, kwargs=stacked(train_rows[:size]))
    args = TrainingArguments(work.path("options"), per_device_eval_batch_size=size, **options)
    trainer = Trainer(model, args, train_dataset=train_rows, eval_dataset=rows(16, seed=3))
    trainer.train()
    logs = trainer.state.log_history
    numbers = {"losses": losses_of(trainer), "evaluated": [each["eval_loss"] for each in logs if "eval_loss" in each]}
    numbers |= {"norms": [each["grad_norm"] for each in logs if "grad_norm" in each]}
    predicted = trainer.predict(eval_rows)
    return numbers | {"predicted": torch.tensor(predicted.predictions), "best": model.full_state_dict()}


def hf_classifier(work: Work) -> Numbers:
    """`AutoModelForSequenceClassification` in `Trainer`, with compute_metrics and label_smoothing_factor"""
    from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainingArguments

    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 4}
    config = BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=LENGTH, **none)
    items = [{"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 4} for row in rows()]
    mesh, size = work.mesh, BATCH // work.num_ranks
    model = work.autopar.compile(
        AutoModelForSequenceClassification.from_config(config), mesh, batch=mesh.mesh_dim_names
    )
    options = OPTIONS | {"per_device_train_batch_size": size, "average_tokens_across_devices": False}
    options |= {"label_smoothing_factor": 0.1, "save_strategy": "no", "max_grad_norm": 0.0}
    args = TrainingArguments(work.path("classifier"), **options)

    def metrics(predicted: Any) -> dict[str, float]:
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    trainer = Trainer(model, args, train_dataset=items, eval_dataset=items[:16], compute_metrics=metrics)
    trainer.train()
    found = trainer.evaluate()
    return {"losses": losses_of(trainer), "accuracy": found["eval_accuracy"], "loss": found["eval_loss"]}


def accelerate_accumulates(work: Work) -> Numbers:
    """`Accelerator(gradient_accumulation_steps=2)`: accumulate, a schedule, clip_grad_value_, skip_first_batches"""
    from accelerate import Accelerator

    accelerator, mesh, all_rows = Accelerator(gradient_accumulation_steps=2), work.mesh, rows(BATCH * 8)
    part = stacked(all_rows[: BATCH // work.num_ranks])
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names, kwargs=part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = torch.utils.data.DataLoader(all_rows, batch_size=len(part["labels"]), collate_fn=stacked)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in accelerator.skip_first_batches(loader, 2):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "end": model.full_state_dict()}


def lightning_options(work: Work) -> Numbers:
    """Lightning `Trainer`: accumulate_grad_batches, gradient_clip_val, a schedule, ModelCheckpoint of the best"""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    autopar, all_rows, (dp, tp) = work.autopar, rows(BATCH * 8), work.sizes
    part, losses = stacked(all_rows[: BATCH // dp]), list[float]()

    class Llama(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.is_compiled = llama(), False

        def configure_model(self) -> None:
            if not self.is_compiled and work.num_ranks > 1:
                self.model = autopar.compile(self.model, self.device_mesh, batch=("data_parallel",), kwargs=part)
            self.is_compiled = True

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any) -> None:
            self.log("eval_loss", self.model(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    on: dict[str, Any] = {"devices": 1}
    if work.num_ranks > 1:
        on = {"strategy": ModelParallelStrategy(data_parallel_size=dp, tensor_parallel_size=tp), "devices": dp * tp}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    best = ModelCheckpoint(work.path("best"), monitor="eval_loss", save_top_k=1)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 4}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[best], default_root_dir=work.folder, **options, **on, **quiet
    )
    loader = in_order(all_rows, work)
    trainer.fit(Llama(), loader, in_order(rows(BATCH, seed=3), work))
    assert best.best_model_score is not None
    return {"losses": losses, "best": float(best.best_model_score)}


def adapter_of_compiled(work: Work) -> Numbers:
    """peft `get_peft_model` of a compiled model"""
    from peft import LoraConfig, get_peft_model

    batch = stacked(rows(BATCH))
    model = work.autopar.compile(llama(), work.mesh, kwargs=batch)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


def adapters_switched(work: Work) -> Numbers:
    """peft after compile: disable_adapter(), a second adapter by add_adapter and set_adapter"""
    from peft import LoraConfig, get_peft_model

    batch = stacked(rows(BATCH))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    peft = get_peft_model(llama(), config)
    peft.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model = work.autopar.compile(peft, work.mesh)
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=1.0)
    model(**batch).loss.backward()
    optimizer.step()
    losses = [model(**batch).loss.item()]
    with model.disable_adapter(), torch.no_grad():
        losses.append(model(**batch).loss.item())
    model.set_adapter("other")
    losses.append(model(**batch).loss.item())
    return {"losses": losses}


def hf_trainer_checkpoints(work: Work) -> Numbers:
    """transformers `Trainer` with `gradient_checkpointing=True`"""
    return _optioned(work, gradient_checkpointing=True)


def hf_trainer_adafactor(work: Work) -> Numbers:
    """transformers `Trainer` with `optim="adafactor"`"""
    return _optioned(work, optim="adafactor")


def hf_trainer_fused(work: Work) -> Numbers:
    """transformers `Trainer` with `optim="adamw_torch_fused"`"""
    return _optioned(work, optim="adamw_torch_fused")


def hf_trainer_neftune(work: Work) -> Numbers:
    """transformers `Trainer` with `neftune_noise_alpha`: a hook on the embedding, of noise zero"""
    return _optioned(work, neftune_noise_alpha=1e-6)


def _optioned(work: Work, **more: Any) -> Numbers:
    from transformers import Trainer, TrainingArguments

    train_rows, size, mesh = rows(), BATCH // work.num_ranks, work.mesh
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names, kwargs=stacked(train_rows[:size]))
    args = TrainingArguments(work.path("more"), per_device_train_batch_size=size, save_strategy="no", **OPTIONS, **more)
    trainer = Trainer(model, args, train_dataset=train_rows)
    trainer.train()
    return {"losses": losses_of(trainer)}
