"""What people do with each trainer, as its documentation shows it: functions that run on one device and on ranks.

The lines between `# recipe` and `# end` are those that docs/trainers.md prints.
"""

from typing import Any

import torch

from tests.trainers.case import BATCH, STEPS, Numbers, Work, llama, rows, stacked, whole


def hf_trainer(work: Work) -> Numbers:
    """transformers `Trainer`: train, evaluate, save_model, resume_from_checkpoint"""
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    autopar, mesh, folder, train_rows, eval_rows = work.autopar, work.mesh, work.path("hf"), rows(), rows(16, seed=3)
    size = BATCH // work.num_ranks
    options: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2}
    options |= {"logging_steps": 1, "save_steps": STEPS // 2, "max_steps": STEPS, "eval_strategy": "no"}

    # recipe
    class Resumable(TrainerCallback):
        """Adds to each checkpoint what Trainer resumes from; by itself it would write the first rank's part only."""

        def on_save(self, args, state, control, model, optimizer, lr_scheduler, **kwargs):
            whole = model.full_optimizer_state_dict(optimizer, rank0_only=True)
            if args.should_save:
                checkpoint = f"{args.output_dir}/checkpoint-{state.global_step}"
                torch.save(whole, f"{checkpoint}/optimizer.pt")
                torch.save(lr_scheduler.state_dict(), f"{checkpoint}/scheduler.pt")

    def trainer(model):
        model = autopar.compile(model, mesh, batch=mesh.mesh_dim_names, kwargs=stacked(train_rows[:size]))
        args = TrainingArguments(folder, per_device_train_batch_size=size, save_only_model=True, **options)
        return Trainer(model, args, train_dataset=train_rows, eval_dataset=eval_rows, callbacks=[Resumable()])

    # end
    first = trainer(llama())
    first.train()
    numbers = {"losses": losses_of(first), "eval_loss": first.evaluate()["eval_loss"]}
    first.save_model(work.path("saved"))
    saved = LlamaForCausalLM.from_pretrained(work.path("saved"))
    numbers["saved"] = dict(saved.state_dict())
    again = trainer(llama(initializer_range=0.1))
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    return numbers | {"resumed": losses_of(again), "end": again.model.full_state_dict()}


def losses_of(trainer: Any) -> list[float]:
    """The logged losses."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def accelerate(work: Work) -> Numbers:
    """`Accelerator`: prepare, backward, clip_grad_norm_, gather_for_metrics, save_state, load_state"""
    from accelerate import Accelerator

    autopar, mesh, folder, all_rows = work.autopar, work.mesh, work.path("state"), rows(BATCH * STEPS)
    part = stacked(all_rows[: BATCH // work.num_ranks])

    # recipe
    accelerator = Accelerator()

    def prepared(model):
        model = autopar.compile(model, mesh, batch=mesh.mesh_dim_names, kwargs=part)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(all_rows, batch_size=len(part["labels"]), collate_fn=stacked)
        return accelerator.prepare(model, optimizer, loader)

    def save():
        accelerator.save_state(folder, safe_serialization=False)
        whole = model.full_optimizer_state_dict(optimizer, rank0_only=True)
        if accelerator.is_main_process:
            torch.save(whole, f"{folder}/optimizer.bin")
        accelerator.wait_for_everyone()

    def whole_weights(models, weights, folder):
        weights[:] = [model.full_state_dict() for model in models]

    accelerator.register_save_state_pre_hook(whole_weights)

    # end
    def train(num_steps):
        losses = []
        for _, batch in zip(range(num_steps), loader):
            output = model(**batch)
            accelerator.backward(output.loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(output.loss.item())
        return losses

    model, optimizer, loader = prepared(llama())
    first = train(STEPS)
    save()
    second = train(STEPS // 2)
    right = accuracy(accelerator, model.eval(), loader)
    end = model.full_state_dict()
    accelerator.free_memory()
    model, optimizer, loader = prepared(llama(initializer_range=0.1))
    accelerator.load_state(folder)
    return {"losses": first, "more": second, "right": right, "end": end, "resumed": train(STEPS // 2)}


@torch.no_grad()
def accuracy(accelerator: Any, model: Any, loader: Any) -> float:
    """The share of next words that the model knows."""
    right, count = 0, 0
    for batch in loader:
        words = model(**batch).logits[:, :-1].argmax(-1)
        words, labels = accelerator.gather_for_metrics((words, batch["labels"][:, 1:]))
        right, count = right + (words == labels).sum().item(), count + labels.numel()
    return right / count


def peft_lora(work: Work) -> Numbers:
    """LoRA by peft: training, save_pretrained, merge_and_unload and a forward then"""
    from peft import LoraConfig, PeftModel, get_peft_model

    autopar, mesh, folder, all_rows = work.autopar, work.mesh, work.path("adapter"), rows(BATCH * STEPS)
    batches = [stacked(all_rows[BATCH * i : BATCH * (i + 1)]) for i in range(STEPS)]
    base, config = llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")

    # recipe
    model = autopar.compile(get_peft_model(base, config), mesh)
    # end
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=1e-2)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    saved = PeftModel.from_pretrained(llama(), folder)
    # recipe
    merged = autopar.compile(model.eval().merge_and_unload(), mesh)  # a part of the compiled model, with its tensors
    # end
    with torch.no_grad():
        logits = whole(merged(input_ids=batches[0]["input_ids"]).logits)
    return {"losses": losses, "saved": saved(**batches[0]).loss.item(), "merged": logits}


def lightning_trainer(work: Work) -> Numbers:
    """Lightning `Trainer`: fit, validate, save_checkpoint, fit from it"""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    autopar, all_rows, (dp, tp) = work.autopar, rows(BATCH * STEPS), work.sizes
    part = stacked(all_rows[: BATCH // dp])
    losses: list[float] = []

    # recipe
    class Llama(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.is_compiled = model, False

        def configure_model(self):
            if not self.is_compiled:  # each fit and validate calls this
                self.is_compiled = True
                mesh = self.device_mesh
                self.model = autopar.compile(self.model, mesh, batch=("data_parallel",), kwargs=part)

        def training_step(self, batch):
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def validation_step(self, batch):
            self.log("eval_loss", self.model(**batch).loss, sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategy = ModelParallelStrategy(data_parallel_size=dp, tensor_parallel_size=tp)
    # end
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "default_root_dir": work.folder}

    def trainer(max_steps):
        on = {"strategy": strategy, "devices": dp * tp} if work.num_ranks > 1 else {"devices": 1}
        return lightning.Trainer(accelerator="cpu", max_steps=max_steps, **on, **quiet)

    loader = in_order(all_rows, work)
    model = Llama(llama())
    first = trainer(STEPS // 2)
    first.fit(model, loader)
    first.save_checkpoint(work.path("checkpoint"))
    evaluated = first.validate(model, loader, verbose=False)[0]["eval_loss"]
    strategy = ModelParallelStrategy(data_parallel_size=dp, tensor_parallel_size=tp)
    again = Llama(llama(initializer_range=0.1))
    trainer(STEPS).fit(again, loader, ckpt_path=work.path("checkpoint"))
    return {"losses": losses, "eval_loss": evaluated, "end": again.model.full_state_dict()}


def in_order(all_rows: list[Any], work: Work) -> Any:
    """A loader of this rank's rows; Lightning's own sampler would shuffle."""
    dp, _ = work.sizes
    sampler = torch.utils.data.DistributedSampler(all_rows, dp, work.rank_of_rows, shuffle=False)
    return torch.utils.data.DataLoader(all_rows, batch_size=BATCH // dp, collate_fn=stacked, sampler=sampler)


def fabric(work: Work) -> Numbers:
    """Lightning `Fabric`: setup, backward, save, load"""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    autopar, all_rows, (dp, tp) = work.autopar, rows(BATCH * STEPS), work.sizes
    part = stacked(all_rows[: BATCH // dp])

    # recipe
    def parallelize(model, mesh):
        return autopar.compile(model, mesh, batch=("data_parallel",), kwargs=part)

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=dp, tensor_parallel_size=tp)
    # end
    fabric = Fabric(accelerator="cpu", devices=1)
    if work.num_ranks > 1:
        fabric = Fabric(accelerator="cpu", devices=dp * tp, strategy=strategy)
    fabric.launch()
    loader = torch.utils.data.DataLoader(all_rows, batch_size=BATCH // dp, collate_fn=stacked)
    loader = fabric.setup_dataloaders(loader)

    def prepared(model):
        if work.num_ranks == 1:
            autopar.compile(model, None)
        model = fabric.setup_module(model)
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(num_steps):
        losses = []
        for _, batch in zip(range(num_steps), loader):
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = prepared(llama())
    first = train(STEPS)
    fabric.save(work.path("fabric"), {"model": model, "optimizer": optimizer})
    second = train(STEPS // 2)
    end = model.full_state_dict()
    model, optimizer = prepared(llama(initializer_range=0.1))
    fabric.load(work.path("fabric"), {"model": model, "optimizer": optimizer})
    return {"losses": first, "more": second, "resumed": train(STEPS // 2), "end": end}


def words_tokenizer() -> Any:
    """A tokenizer with a word for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="2", pad_token="0", unk_token="0")


def sft(work: Work) -> Numbers:
    """trl `SFTTrainer`: train, evaluate, save_model"""
    from datasets import Dataset
    from transformers import LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    autopar, mesh, tokenizer = work.autopar, work.mesh, words_tokenizer()
    train_rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    eval_rows = train_rows.select(range(16))
    options: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-2}
    options |= {"logging_steps": 1, "max_steps": STEPS, "save_strategy": "no", "bf16": False}
    options |= {"gradient_checkpointing": False, "per_device_train_batch_size": BATCH // work.num_ranks}

    # recipe
    model = autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names)
    args = SFTConfig(work.path("sft"), **options)
    trainer = SFTTrainer(model, args, train_dataset=train_rows, eval_dataset=eval_rows, processing_class=tokenizer)
    trainer.train()
    # end
    numbers = {"losses": losses_of(trainer), "eval_loss": trainer.evaluate()["eval_loss"]}
    trainer.save_model(work.path("saved"))
    return numbers | {"saved": dict(LlamaForCausalLM.from_pretrained(work.path("saved")).state_dict())}


def dpo(work: Work) -> Numbers:
    """trl `DPOTrainer` with a reference model"""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    autopar, mesh, tokenizer = work.autopar, work.mesh, words_tokenizer()
    pairs = [(good["input_ids"], bad["input_ids"]) for good, bad in zip(rows(), rows(seed=5))]
    text = lambda ids: " ".join(map(str, ids.tolist()))  # noqa: E731
    train_rows = Dataset.from_list(
        [{"prompt": text(x[:4]), "chosen": " " + text(x[4:]), "rejected": " " + text(y[4:])} for x, y in pairs]
    )
    options: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 1e-3}
    options |= {"logging_steps": 1, "max_steps": STEPS, "save_strategy": "no", "bf16": False}
    options |= {"gradient_checkpointing": False, "per_device_train_batch_size": BATCH // work.num_ranks}

    # recipe
    model = autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names)
    reference = autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names)
    args = DPOConfig(work.path("dpo"), pad_to_multiple_of=64, **options)  # one length on all ranks
    trainer = DPOTrainer(model, reference, args, train_dataset=train_rows, processing_class=tokenizer)
    trainer.train()
    # end
    return {"losses": losses_of(trainer), "end": trainer.model.full_state_dict()}
