"""DiLoCo under the Trainer of Hugging Face transformers: the callback that goes with the optimizer.

    Trainer(..., optimizers=(optimizer, None), callbacks=[TransformersCallback(optimizer)])

The Trainer keeps its schedule, clipping, accumulation, precision and checkpoints; each worker needs an `output_dir` of
its own. Workers may have different numbers of steps. Subclasses of Trainer (TRL's SFTTrainer) work the same. Refused: a
Trainer that sees the other workers, and load_best_model_at_end, which would replace a worker's parameters before the
last round averages them.
"""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """Runs the last rounds at the end of training, and stops this worker when another worker stops early."""

    def __init__(self, optimizer: DiLoCo, *, end_together: bool = False) -> None:
        """`end_together`: this worker stops when another one has taken all its steps; else it takes all of its own."""
        self.optimizer = optimizer
        self.end_together = end_together

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        del state, control, more
        if args.world_size > 1 or args.n_gpu > 1:
            raise ConfigError(
                f"the Trainer sees {args.world_size} processes and {args.n_gpu} GPUs, and would average gradients "
                "over them: call engine = diloco.connect(island=True) before TrainingArguments is made"
            )
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end replaces this worker's parameters before the last round, which would average "
                "them: leave it out, and load the checkpoint that you want after train()"
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        del args, state, more
        if self.optimizer.stopping or self._ends_with_the_others():
            control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        del args, control, more
        self.optimizer.finish(early=state.global_step < state.max_steps and not self._ends_with_the_others())

    def _ends_with_the_others(self) -> bool:
        return self.end_together and self.optimizer.others_done
