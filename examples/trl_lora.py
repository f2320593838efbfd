"""TRL's SFTTrainer and a peft LoRA as a DiLoCo worker: torchrun --nproc-per-node 2 examples/trl_lora.py

The model is wrapped in its LoRA before DiLoCo is built; only the adapters, which are trainable, are averaged.
`island=True`: the trainer must see a single process (examples/hf_trainer.py says why).
"""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import diloco
from diloco.integrations.transformers import TransformersCallback

NUMBERS = [str(number) for number in range(21)]


def successors(worker: int, count: int) -> Dataset:
    """A worker's own share of the data: a number as prompt, the next one as completion."""
    numbers = torch.randint(20, (count,), generator=torch.Generator().manual_seed(worker)).tolist()
    return Dataset.from_list([{"prompt": f"{number} then", "completion": f" {number + 1}"} for number in numbers])


def main() -> None:
    torch.set_num_threads(1)
    engine = diloco.connect(island=True)  # first: SFTConfig reads the environment
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<end>", "then", *NUMBERS])}, "<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    args = SFTConfig(
        output_dir=f"runs/trl_lora/worker-{engine.worker}",
        num_train_epochs=1,
        per_device_train_batch_size=16,
        logging_steps=10,
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=23, initializer_range=0.3, **shape)).to(args.device)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    inner = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    optimizer = diloco.DiLoCo(model, inner, engine, H=10, outer="sgd")
    data, test = successors(engine.worker, 16 * (60 + 9 * engine.worker)), successors(1000, 64)  # 60 and 69 steps
    how = {"optimizers": (optimizer, None), "callbacks": [TransformersCallback(optimizer)]}  # it runs the last rounds
    trainer = SFTTrainer(model, args, None, data, test, tokenizer, **how)
    trainer.train()
    first, final = trainer.state.log_history[0]["loss"], trainer.evaluate()["eval_loss"]
    place, digest = engine.worker, optimizer.anchor_digest()
    print(f"worker {place}  first loss {first:.4f}  final loss {final:.4f}  parameters {digest}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
