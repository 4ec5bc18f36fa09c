"""Models of transformers in use: text generated between steps, embeddings resized, checkpointing and ties switched."""

from collections.abc import Callable

import torch
from torch import nn

from tests.journey.case import FORWARD, Numbers, Run, case
from tests.journey.cases.hf import LENGTH, WORDS, gpt2, llama, words


def rounds(run: Run, model: nn.Module, between: Callable[[nn.Module], Numbers], num_rounds: int = 2) -> Numbers:
    """Steps on words, and what `between(model)` gives after each."""
    ids, numbers = words(), Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(num_rounds):
        numbers[f"loss {number}"] = run.step(model, input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
        numbers |= {f"{key} {number}": x for key, x in between(model).items()}
    return numbers | run.parameters(model)


def generated(model: nn.Module, **options: object) -> torch.Tensor:
    """Words that follow two prompts."""
    prompts = torch.arange(1, 7).view(2, 3)
    model.eval()
    found = model.generate(prompts, attention_mask=torch.ones_like(prompts), pad_token_id=0, **options)
    model.train()
    return found


@case(on=FORWARD, peers=False)
def generate_between_steps(run: Run) -> Numbers:
    """model.eval(), model.generate of two prompts and model.train() between steps, with the weights of then"""
    model = run.compile(gpt2())
    return rounds(run, model, lambda model: {"text": generated(model, max_new_tokens=4, do_sample=False)})


@case(on=FORWARD, peers=False)
def beams_and_samples(run: Run) -> Numbers:
    """generate with num_beams=3, with do_sample=True of a seed, and with scores of each word"""
    model = run.compile(gpt2())
    ids = words()
    run.step(model, input_ids=ids, labels=ids)
    beams = generated(model, max_new_tokens=3, num_beams=3, do_sample=False)
    torch.manual_seed(5)
    sampled = generated(model, max_new_tokens=3, do_sample=True, top_k=0)
    whole = generated(
        model, max_new_tokens=3, do_sample=False, output_scores=True, return_dict_in_generate=True, min_new_tokens=2
    )
    return {"beams": beams, "sampled": sampled, "scores": torch.stack(whole.scores), "words": whole.sequences}


@case(on=FORWARD, peers=False)
def prompts_padded_on_the_left(run: Run) -> Numbers:
    """generate of prompts of other lengths, padded on the left, with an attention mask, by a Llama"""
    model = run.compile(llama(eos_token_id=None, bos_token_id=None).eval())
    prompts, mask = torch.tensor([[0, 0, 4], [3, 9, 5]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    return {"words": model.generate(prompts, attention_mask=mask, **options)}


@case(on=FORWARD, peers=False)
def generate_of_an_encoder_and_a_decoder(run: Run) -> Numbers:
    """A small BART: steps with labels, and generate between them, with and without beams"""
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    tokens |= {"forced_eos_token_id": None}
    sizes = {"vocab_size": WORDS, "d_model": 16, "max_position_embeddings": 4 * LENGTH, "dropout": 0.0}
    model = run.compile(BartForConditionalGeneration(BartConfig(**sizes, **sides, **heads, **tokens)))

    def between(model: nn.Module) -> Numbers:
        greedy = generated(model, max_new_tokens=4, do_sample=False, num_beams=1)
        return {"greedy": greedy, "beams": generated(model, max_new_tokens=4, do_sample=False, num_beams=2)}

    return rounds(run, model, between)


@case(on=FORWARD)
def embeddings_resized_before(run: Run) -> Numbers:
    """model.resize_token_embeddings to an odd number of words before compile, tied weights as well"""
    model = gpt2()
    model.resize_token_embeddings(WORDS + 5, mean_resizing=False)
    model = run.compile(model)
    ids = words()
    return {"loss": run.step(model, input_ids=ids, labels=ids)} | run.gradients(model)


@case(on=FORWARD, peers=False, refused="resize_token_embeddings, is called before autopar.compile")
def embeddings_resized_after(run: Run) -> Numbers:
    """model.resize_token_embeddings after a step"""
    model = run.compile(gpt2())
    ids = words()
    first = run.step(model, input_ids=ids, labels=ids)
    model.zero_grad()
    torch.manual_seed(4)
    model.resize_token_embeddings(WORDS + 8, mean_resizing=False)
    return {"first": first, "loss": run.step(model, input_ids=ids, labels=ids)} | run.gradients(model)


@case(on=FORWARD)
def checkpointing_switched(run: Run) -> Numbers:
    """model.gradient_checkpointing_enable() after compile, a step, gradient_checkpointing_disable(), and another"""
    ids = words()
    model = run.compile(llama(use_cache=False))
    inner = run.inner(model)
    inner.gradient_checkpointing_enable()
    first = run.step(model, input_ids=ids, labels=ids)
    inner.gradient_checkpointing_disable()
    return {"first": first, "second": run.step(model, input_ids=ids, labels=ids)} | run.gradients(model)


@case(on=FORWARD, peers=False)
def tied_again_after(run: Run) -> Numbers:
    """tie_word_embeddings=True, model.tie_weights() after compile, named_parameters(remove_duplicate=False)"""
    ids = words()
    model = run.compile(llama(tie_word_embeddings=True))
    first = run.step(model, input_ids=ids, labels=ids)
    model.tie_weights()
    names = len(list(model.named_parameters(remove_duplicate=False))) - len(list(model.named_parameters()))
    second = run.step(model, input_ids=ids, labels=ids)
    return {"first": first, "second": second, "names": torch.tensor(float(names))} | run.gradients(model)
