"""What people hang into the loops of trainers: callbacks that read gradients, losses of their own, averages, texts."""

from typing import Any

import torch

from tests.trainers.case import BATCH, LENGTH, WORDS, Numbers, Work, llama, rows, stacked, whole
from tests.trainers.cases import in_order, losses_of, words_tokenizer
from tests.trainers.further_cases import OPTIONS


def hf_trainer_callbacks(work: Work) -> Numbers:
    """transformers `Trainer`: callbacks that read norms and stop early, compute_loss, optimizers=(...)"""
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    train_rows, size, mesh, norms = rows(61), BATCH // work.num_ranks, work.mesh, list[float]()

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            squares = (whole(p.grad.norm()).item() ** 2 for p in model.parameters() if p.grad is not None)
            norms.append(sum(squares) ** 0.5)

    class Weighted(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            words = outputs.logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(words, labels[:, 1:].flatten(), label_smoothing=0.1)
            return (loss, outputs) if return_outputs else loss

    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "max_steps": 10}
    more |= {"metric_for_best_model": "eval_loss", "per_device_train_batch_size": size, "save_only_model": True}
    more |= {"average_tokens_across_devices": False, "max_grad_norm": 0.0, "dataloader_drop_last": True}
    args = TrainingArguments(work.path("callbacks"), per_device_eval_batch_size=size, **OPTIONS | more)
    trainer = Weighted(
        model,
        args,
        train_dataset=train_rows,
        eval_dataset=rows(16, seed=3),
        optimizers=(optimizer, schedule),
        callbacks=[Norms(), EarlyStoppingCallback(2)],
    )
    trainer.train()
    return {"losses": losses_of(trainer), "norms": norms, "steps": trainer.state.global_step}


def hf_trainer_generates(work: Work) -> Numbers:
    """`Seq2SeqTrainer(predict_with_generate=True)` of a BART, with compute_metrics of the texts, and predict"""
    from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    sizes = {"vocab_size": WORDS, "d_model": 32, "max_position_embeddings": 4 * LENGTH, "dropout": 0.0}
    torch.manual_seed(1)
    model = BartForConditionalGeneration(BartConfig(**sizes, **sides, **heads, **tokens))
    model.generation_config.max_new_tokens, model.generation_config.num_beams = 4, 1
    mesh, size = work.mesh, BATCH // work.num_ranks
    model = work.autopar.compile(model, mesh, batch=mesh.mesh_dim_names)
    options = OPTIONS | {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    options |= {"predict_with_generate": True, "save_strategy": "no", "average_tokens_across_devices": False}

    def metrics(predicted: Any) -> dict[str, float]:
        return {"sum": float(predicted.predictions.sum())}

    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(work.path("texts"), **options),
        train_dataset=rows(),
        eval_dataset=rows(16, seed=3),
        compute_metrics=metrics,
    )
    trainer.train()
    return {"losses": losses_of(trainer), "sum": trainer.evaluate()["eval_sum"]}


def hf_trainer_compiles(work: Work) -> Numbers:
    """transformers `Trainer` with `torch_compile=True`"""
    return _few(work, torch_compile=True, torch_compile_backend="aot_eager")


def hf_trainer_other_lengths(work: Work) -> Numbers:
    """transformers `Trainer` with rows of other lengths, padded to a multiple of 8 in each batch"""
    lengths = torch.arange(64) // BATCH % 3 * 4 + 6  # of a batch alike, within it not
    ids = [row["input_ids"][: length - i % 2] for i, (row, length) in enumerate(zip(rows(), lengths.tolist()))]

    def padded(items: Any) -> dict[str, torch.Tensor]:
        longest = -(-max(len(item["input_ids"]) for item in items) // 8) * 8
        fill = lambda value: torch.stack(  # noqa: E731
            [torch.nn.functional.pad(x["input_ids"], (0, longest - len(x["input_ids"])), value=value) for x in items]
        )
        return {"input_ids": fill(0), "labels": fill(-100), "attention_mask": (fill(-1) >= 0).long()}

    return _few(work, [{"input_ids": x} for x in ids], padded, train_sampling_strategy="sequential")


def _few(work: Work, items: Any = None, collate: Any = None, **more: Any) -> Numbers:
    from transformers import Trainer, TrainingArguments

    mesh, size = work.mesh, BATCH // work.num_ranks
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names)
    options = OPTIONS | {"per_device_train_batch_size": size, "save_strategy": "no"} | more
    args = TrainingArguments(work.path("few"), **options)
    trainer = Trainer(model, args, train_dataset=items or rows(), data_collator=collate)
    trainer.train()
    return {"losses": losses_of(trainer)}


def accelerate_saves(work: Work) -> Numbers:
    """`Accelerator`: no_sync, reduce, a prepared schedule, and model.save_pretrained"""
    import contextlib

    from accelerate import Accelerator
    from safetensors.torch import load_file

    accelerator, mesh, all_rows = Accelerator(), work.mesh, rows(BATCH * 4)
    part = stacked(all_rows[: BATCH // work.num_ranks])
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names, kwargs=part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = torch.utils.data.DataLoader(all_rows, batch_size=len(part["labels"]), collate_fn=stacked)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for i, batch in enumerate(loader):
        with accelerator.no_sync(model) if i % 2 == 0 else contextlib.nullcontext():
            loss = model(**batch).loss
            accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(work.path("saved"))
    accelerator.wait_for_everyone()
    whole_state, saved = model.full_state_dict(), load_file(work.path("saved") + "/model.safetensors")
    return {"losses": losses, "state": whole_state, "saved": saved}


def accelerate_saves_parts(work: Work) -> Numbers:
    """`Accelerator`: save_model, which writes what state_dict() gives"""
    from accelerate import Accelerator

    accelerator, mesh = Accelerator(), work.mesh
    part = stacked(rows(BATCH // work.num_ranks))
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names, kwargs=part)
    accelerator.save_model(accelerator.prepare(model), work.path("parts"), safe_serialization=True)
    return {"loss": model(**part).loss.item()}


def accelerate_compiles(work: Work) -> Numbers:
    """`Accelerator(dynamo_backend="aot_eager")`"""
    from accelerate import Accelerator

    accelerator, mesh = Accelerator(dynamo_backend="aot_eager"), work.mesh
    part = stacked(rows(BATCH // work.num_ranks))
    model = work.autopar.compile(llama(), mesh, batch=mesh.mesh_dim_names, kwargs=part)
    return {"loss": accelerator.prepare(model)(**part).loss.item()}


def _lightning(work: Work, **options: Any) -> Any:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    dp, tp = work.sizes
    on: dict[str, Any] = {"devices": 1}
    if work.num_ranks > 1:
        on = {"strategy": ModelParallelStrategy(data_parallel_size=dp, tensor_parallel_size=tp), "devices": dp * tp}
    quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": work.folder}
    return lightning.Trainer(accelerator="cpu", max_epochs=1, **on, **quiet, **options)


def _module(work: Work) -> Any:
    import lightning

    class Llama(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.is_compiled, self.seen = llama(), False, list[float]()

        def configure_model(self) -> None:
            if not self.is_compiled and work.num_ranks > 1:
                self.model = work.autopar.compile(self.model, self.device_mesh, batch=("data_parallel",))
            self.is_compiled = True

        def training_step(self, batch: Any) -> Any:
            loss = self.model(**batch).loss
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Llama


def lightning_by_hand(work: Work) -> Numbers:
    """Lightning with automatic_optimization=False: manual_backward, two optimizers, norms before each step"""

    class ByHand(_module(work)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.norms = False, list[float]()

        def training_step(self, batch: Any) -> None:
            loss = self.model(**batch).loss
            self.seen.append(loss.item())
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            squares = (whole(p.grad.norm()).item() ** 2 for p in self.parameters() if p.grad is not None)
            self.norms.append(sum(squares) ** 0.5)

        def configure_optimizers(self) -> Any:
            first, rest = [*self.parameters()][:3], [*self.parameters()][3:]
            return torch.optim.SGD(first, lr=0.5), torch.optim.AdamW(rest, lr=1e-2)

    model = ByHand()
    _lightning(work, enable_checkpointing=False).fit(model, in_order(rows(BATCH * 4), work))
    return {"losses": model.seen, "norms": model.norms}


def lightning_averages(work: Work) -> Numbers:
    """Lightning `EMAWeightAveraging`, which copies the model before it is compiled, with EarlyStopping and test"""
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging

    class Tested(_module(work)):  # type: ignore[misc]
        def validation_step(self, batch: Any) -> None:
            self.log("eval_loss", self.model(**batch).loss, sync_dist=True)

        def test_step(self, batch: Any) -> None:
            self.log("test_loss", self.model(**batch).loss, sync_dist=True)

    model = Tested()
    callbacks = [EMAWeightAveraging(decay=0.5), EarlyStopping("eval_loss")]
    trainer = _lightning(work, callbacks=callbacks, enable_checkpointing=False)
    trainer.fit(model, in_order(rows(BATCH * 4), work), in_order(rows(BATCH, seed=3), work))
    found = trainer.test(model, in_order(rows(BATCH, seed=4), work), verbose=False)
    return {
        "losses": model.seen,
        "test": found[0]["test_loss"],
        "evaluated": float(trainer.callback_metrics["test_loss"]),
    }


def reward(work: Work) -> Numbers:
    """trl `RewardTrainer`: pairs of answers, a classifier of one label"""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_labels": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False, pad_token_id=0)
    model = work.autopar.compile(LlamaForSequenceClassification(config), work.mesh, batch=work.mesh.mesh_dim_names)
    text = lambda ids: " ".join(map(str, ids.tolist()))  # noqa: E731
    pairs = [(text(good["input_ids"]), text(bad["input_ids"])) for good, bad in zip(rows(), rows(seed=5))]
    options = OPTIONS | {"save_strategy": "no", "bf16": False, "gradient_checkpointing": False, "max_length": 32}
    options |= {"per_device_train_batch_size": BATCH // work.num_ranks, "pad_to_multiple_of": 32}
    trainer = RewardTrainer(
        model,
        RewardConfig(work.path("reward"), **options),
        train_dataset=Dataset.from_list([{"chosen": good, "rejected": bad} for good, bad in pairs]),
        processing_class=words_tokenizer(),
    )
    trainer.train()
    return {"losses": losses_of(trainer)}


def peft_kinds(work: Work) -> Numbers:
    """peft: prompt tuning, prefix tuning, IA3, DoRA and LoRA with rslora of all linear layers, three steps each"""
    from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

    kinds = {
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "ia3": IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "dora": LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights="gaussian"),
        "rslora": LoraConfig(r=4, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"),
    }
    batch, numbers = stacked(rows(BATCH)), {}
    for name, config in kinds.items():
        base = llama()
        torch.manual_seed(1)
        model = work.autopar.compile(get_peft_model(base, config), work.mesh)
        optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=1.0)
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        numbers[name] = losses
    return numbers


def peft_loads(work: Work) -> Numbers:
    """peft: get_peft_model_state_dict, set_peft_model_state_dict and load_adapter into a compiled model"""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    batch, single = stacked(rows(BATCH)), get_peft_model(llama(), config)
    torch.manual_seed(3)
    for name, p in single.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    state = {name: x.clone() for name, x in get_peft_model_state_dict(single).items()}
    if torch.distributed.get_rank() == 0:
        single.save_pretrained(work.path("adapter"))
    torch.distributed.barrier()
    model = work.autopar.compile(get_peft_model(llama(), config), work.mesh)
    first = model(**batch).loss.item()
    set_peft_model_state_dict(model, state)
    second = model(**batch).loss.item()
    model.load_adapter(work.path("adapter"), "again", is_trainable=True)
    model.set_adapter("again")
    return {"losses": [first, second, model(**batch).loss.item()]}
