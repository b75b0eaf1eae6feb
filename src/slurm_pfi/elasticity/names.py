"""Names that files write in many ways: which two mean the same GPU model, which the same family of workloads."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_VENDOR: Final = frozenset({"nvidia", "tesla", "quadro", "geforce", "amd", "instinct", "radeon"})
_FORM: Final = re.compile(r"sxm\d*|pcie|nvl\d*|hbm\d*e?|oam|mig")
_SIZE: Final = re.compile(r"\d+(gb|g|w)|pg\d+|gpu|generation|edition|server|workstation|max|q")
_AMPERE_PRO: Final = re.compile(r"a\d{4}")

_TASK: Final = frozenset(
    {"ft", "pt", "sft", "lora", "infer", "inference", "train", "training", "pretrain", "pretraining", "finetune",
     "finetuning", "continued", "serve", "serving"}
)  # fmt: skip
_LEADING: Final = re.compile(r"\d*([a-z]+)")
_VERSION: Final = re.compile(r"v(?=\d)")

_KNOWN: Final = frozenset(
    {"albert", "alexnet", "bert", "bloom", "clip", "cogvlm", "deepseek", "deepspeech", "densenet", "diffusion",
     "distilbert", "dlrm", "efficientnet", "electra", "falcon", "flux", "gemma", "gnmt", "gpt", "gptj", "granite",
     "inception", "internlm", "llama", "llava", "mamba", "mask", "megatron", "mistral", "mixtral", "mlp", "mobilenet",
     "mpt", "ncf", "nemotron", "olmo", "opt", "phi", "pythia", "qwen", "regnet", "resnet", "resnext", "retinanet",
     "roberta", "shufflenet", "squeezenet", "ssd", "starcoder", "swin", "t5", "transformer", "unet", "vgg", "vit",
     "wav", "whisper", "xlm", "xlnet", "yolo"}
)  # fmt: skip
"""Model architectures that are found anywhere in a name, so that a publisher or a site's prefix does not hide them."""


@lru_cache(maxsize=1024)  # asked for every run of a plan, and a site has a few models
def gpu_key(name: str) -> str:
    """One spelling of a GPU model: without vendor, form factor, memory size and power; empty if nothing is left.

    'A100-SXM(400W)', 'NVIDIA A100-SXM4-80GB' and 'A100' give 'a100'; 'Quadro RTX 6000' gives 'rtx6000'.
    """
    spaced = _FORM.sub(" ", name.lower())
    words = [
        word for word in re.findall(r"[a-z0-9]+", spaced) if word not in _VENDOR and not _SIZE.fullmatch(word)
    ]
    if len(words) > 1 and words[0] == "rtx" and _AMPERE_PRO.fullmatch(words[1]):
        words = words[1:]
    # A bare number belongs to a name only behind a word that has none: RTX 6000, but not A100 400.
    kept: list[str] = []
    for word in words:
        if not (word.isdigit() and kept and any(letter.isdigit() for letter in kept[-1])):
            kept.append(word)
    return "".join(kept)


def same_gpu(one: str, other: str) -> bool:
    """Whether two names mean one GPU model. A name that says nothing is the same as no other."""
    key = gpu_key(one)
    return bool(key) and key == gpu_key(other)


def family_key(family: str) -> str:
    """One spelling of a family: a known architecture named in it, else its letters and digits in lower case.

    'llama_8b' and 'Llama' give 'llama'; a site's own 'fam1' and 'fam2' stay two.
    """
    return _known(family) or "".join(re.findall(r"[a-z0-9]+", family.lower()))


def family_of(*, family: str = "", workload: str = "", curve_id: str = "") -> str:
    """The family key of a curve: the family given, else the model that the workload names, else the curve's name.

    From a workload without a known architecture: the leading letters of its first word that is no task
    ('ft_', 'pt_', 'infer_' ...). Empty only if all three hold no letter or digit.
    """
    if family_key(family):
        return family_key(family)
    return _of_text(workload) or _of_text(curve_id) or family_key(workload) or family_key(curve_id)


def _of_text(text: str) -> str:
    known = _known(text)
    if known:
        return known
    words = [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in _TASK]
    return next((letters for word in words if (letters := _letters(word))), "")


def _known(text: str) -> str:
    for word in re.findall(r"[a-z0-9]+", text.lower()):
        for name in (word, _letters(word)):
            if name in _KNOWN:
                return name
    return ""


def _letters(word: str) -> str:
    """Leading letters, less a version: 'shufflenetv2' gives 'shufflenet'."""
    found = _LEADING.match(_VERSION.sub("", word))
    return found.group(1) if found else ""
