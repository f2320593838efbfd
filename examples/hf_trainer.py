"""Hugging Face Trainer as a DiLoCo worker: torchrun --nproc-per-node 2 examples/hf_trainer.py

`island=True`: under torchrun the Trainer would wrap the model in DDP, divide the data and save on rank 0 only. It
must see a single process; the engine keeps the connection to the other workers. Everything else is the Trainer's.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import diloco
from diloco.integrations.transformers import TransformersCallback


def texts(worker: int, count: int) -> list[dict[str, Tensor]]:
    """A worker's own share of the data: sequences that count upwards by 1 or 2 from a random start."""
    generator = torch.Generator().manual_seed(worker)
    start = torch.randint(64, (count, 1), generator=generator)
    tokens = (start + torch.arange(32) * torch.randint(1, 3, (count, 1), generator=generator)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    torch.set_num_threads(1)
    engine = diloco.connect(island=True)  # first: TrainingArguments reads the environment
    args = TrainingArguments(
        output_dir=f"runs/hf_trainer/worker-{engine.worker}",  # each worker has its own checkpoints
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=40,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **shape))
    model.to(args.device)  # before DiLoCo is built
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = diloco.DiLoCo(model, inner, engine, H=20, outer=diloco.SGD(1.0))
    data = texts(engine.worker, 16 * (120 + 9 * engine.worker))  # 120 steps and 129 steps: shares differ
    callbacks = [TransformersCallback(optimizer)]  # runs the last rounds at the end of training
    trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=callbacks)
    trainer.train()
    first = trainer.state.log_history[0]["loss"]
    final = trainer.evaluate(texts(1000, 64))["eval_loss"]
    digest = optimizer.anchor_digest()
    print(f"worker {engine.worker}  first loss {first:.4f}  final loss {final:.4f}  parameters {digest}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
