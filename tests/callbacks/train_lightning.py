"""A tiny model trained on random numbers with Lightning, from the package named first.

python train_lightning.py lightning.pytorch KEY=VALUE...       each an argument of Trainer, as JSON
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import torch

BATCHES = 8


def model(package: str) -> Any:
    """A module of one layer, with validation."""
    base: Any = import_module(package).LightningModule

    class Tiny(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.layer(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Tiny()


def data() -> torch.utils.data.DataLoader[Any]:
    """BATCHES batches of two."""
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.DataLoader(torch.randn(2 * BATCHES, 4, generator=generator), batch_size=2)


def trainer(package: str, **more: Any) -> Any:
    """A trainer with our callback."""
    lightning = import_module(package)
    from slurm_pfi.callbacks.lightning import ReportProgress

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return lightning.Trainer(callbacks=[ReportProgress()], **{**defaults, **more})


if __name__ == "__main__":
    words = (word.split("=", 1) for word in sys.argv[2:])
    arguments = {key: json.loads(value) for key, value in words}
    trainer(sys.argv[1], **arguments).fit(model(sys.argv[1]), data())
