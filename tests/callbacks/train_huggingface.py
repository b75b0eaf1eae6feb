"""A tiny language model, made from a config and trained on random tokens with the Hugging Face Trainer.

python train_huggingface.py FOLDER KEY=VALUE...       each a TrainingArguments field, as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from slurm_pfi.callbacks.huggingface import ReportProgress

LENGTH = 16
BATCH = 2


class Random(torch.utils.data.Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc]
    """Sequences of LENGTH tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 60, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder: Path, callbacks: Any = (), **more: Any) -> Trainer:
    """A trainer with our callback and ``callbacks``."""
    config = GPT2Config(vocab_size=64, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "max_steps": 4,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(output_dir=str(folder), **{**defaults, **more})
    return Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Random(),
        eval_dataset=Random(),
        callbacks=[ReportProgress(), *callbacks],
    )


if __name__ == "__main__":
    words = (word.split("=", 1) for word in sys.argv[2:])
    trainer(Path(sys.argv[1]), **{key: json.loads(value) for key, value in words}).train()
