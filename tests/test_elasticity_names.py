"""Which names mean the same GPU model, and which family a workload belongs to."""

from __future__ import annotations

import pytest

from slurm_pfi.elasticity.names import family_key, family_of, gpu_key, same_gpu


@pytest.mark.parametrize(
    "names",
    [
        ("A100-SXM(400W)", "NVIDIA A100-SXM4-80GB", "A100", "NVIDIA A100 80GB PCIe", "a100_40gb", "A100SXM4"),
        ("Quadro RTX6000", "RTX6000", "Quadro RTX 6000", "NVIDIA Quadro RTX 6000"),
        ("H100-SXM 94GB", "NVIDIA H100 80GB HBM3", "H100", "NVIDIA H100 NVL"),
        ("V100", "Tesla V100-SXM2-32GB"),
        ("NVIDIA RTX A6000", "A6000"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_one_gpu_model_in_many_spellings(names: tuple[str, ...]) -> None:
    assert all(same_gpu(names[0], other) for other in names), [gpu_key(name) for name in names]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("H100", "H200"), ("A10", "A100"), ("L4", "L40"), ("L40", "L40S"), ("V100", "A100"), ("H200", "GH200"),
        ("Quadro RTX 6000", "NVIDIA RTX 6000 Ada Generation"), ("RTX 6000", "RTX A6000"), ("A40", "A4000"),
        ("GeForce RTX 3090", "GeForce RTX 3090 Ti"), ("MI300X", "MI300A"), ("", ""), ("NVIDIA", "nvidia"),
    ],
)  # fmt: skip
def test_different_gpu_models(one: str, other: str) -> None:
    assert not same_gpu(one, other)


@pytest.mark.parametrize(
    ("workload", "family"),
    [
        ("bert_base_uncased/squad bs8", "bert"), ("resnet50/imagenet", "resnet"), ("ft_llama_8b_dolly", "llama"),
        ("LLaMA-3-8B continued pretraining", "llama"), ("gpt-oss-20b", "gpt"), ("Qwen/Qwen3-30B-A3B", "qwen"),
        ("infer_llama_8b", "llama"), ("pt_mpt_13b_lg", "mpt"), ("shufflenetv2/cifar100 bs8", "shufflenet"),
        ("deepspeech2/librispeech", "deepspeech"), ("meta-llama/Llama-3.1-70B", "llama"), ("3d-unet", "unet"),
        ("ft_ourmodel_3", "ourmodel"), ("ourmodel7b pretraining", "ourmodel"), ("ncf/movielens-1m bs8", "ncf"),
    ],
)  # fmt: skip
def test_families_of_workloads(workload: str, family: str) -> None:
    assert family_of(workload=workload, curve_id="x") == family
    assert family_key(family) == family


def test_where_a_family_comes_from() -> None:
    assert family_of(family="Llama_8B", workload="resnet50", curve_id="x") == "llama"
    assert family_of(curve_id="zeus_v100_bert_base_uncased_squad_bs8") == "bert"
    assert family_of(curve_id="42") == "42"
    assert family_of() == ""
    assert family_key("fam 1") != family_key("fam 2")
