"""Bundled presets: each builds the model of its checkpoint, and common names resolve to one."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from in_roster import needs_task
from snugfit.cli.request import Request
from snugfit.errors import ModelError, UsageError
from snugfit.job.architectures import class_of
from snugfit.job.build import instantiate
from snugfit.job.find import preset_names
from snugfit.job.job import Job, Task
from snugfit.job.model import Model
from snugfit.job.names import SAME_SIZES
from tiers import slow_but

PARAMETERS = {
    # As the hub counts the checkpoint's tensors, or keras-hub's backbones and a head on top; tied weights
    # count once. The config names the class. The model has no head if that class is not
    # trained here (ELECTRA's is of its pretraining).
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 235_093_634_560,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-2-27b-it": 27_227_128_320,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "google/gemma-3-4b-pt": 4_300_079_472,
    "google/gemma-3-12b-pt": 12_187_325_040,
    "google/gemma-3-27b-pt": 27_432_406_640,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "microsoft/phi-4": 14_659_507_200,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-0425-1B-Instruct": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-7B-Instruct": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-1124-13B-Instruct": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "allenai/OLMo-2-0325-32B-Instruct": 32_234_279_936,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
    "allenai/Olmo-3-1125-32B": 32_233_522_176,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "EleutherAI/gpt-neo-125m": 125_198_592,
    "EleutherAI/gpt-neo-1.3B": 1_315_575_808,
    "EleutherAI/gpt-neo-2.7B": 2_651_307_520,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-1b1": 1_065_314_304,
    "bigscience/bloom-1b7": 1_722_408_960,
    "bigscience/bloom-3b": 3_002_557_440,
    "bigscience/bloom-7b1": 7_069_016_064,
    "tiiuae/falcon-7b": 6_921_720_704,
    "state-spaces/mamba-130m-hf": 129_135_360,
    "state-spaces/mamba-370m-hf": 371_516_416,
    "state-spaces/mamba-790m-hf": 793_204_224,
    "state-spaces/mamba-1.4b-hf": 1_372_178_432,
    "state-spaces/mamba-2.8b-hf": 2_768_345_600,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "google-bert/bert-base-uncased": 109_514_298,
    "google-bert/bert-base-cased": 108_340_804,
    "google-bert/bert-large-uncased": 335_174_458,
    "google-bert/bert-large-cased": 333_610_308,
    "google-bert/bert-base-multilingual-cased": 177_974_523,
    "sentence-transformers/all-MiniLM-L6-v2": 22_713_216,
    "sentence-transformers/all-MiniLM-L12-v2": 33_360_000,
    "sentence-transformers/all-mpnet-base-v2": 109_518_527,
    "microsoft/mpnet-base": 109_518_527,
    "BAAI/bge-small-en-v1.5": 33_360_000,
    "BAAI/bge-base-en-v1.5": 109_482_240,
    "BAAI/bge-large-en-v1.5": 335_141_888,
    "BAAI/bge-m3": 567_754_752,
    "FacebookAI/roberta-base": 124_697_433,
    "FacebookAI/roberta-large": 355_412_057,
    "FacebookAI/xlm-roberta-base": 278_295_186,
    "FacebookAI/xlm-roberta-large": 560_142_482,
    "answerdotai/ModernBERT-base": 149_655_232,
    "answerdotai/ModernBERT-large": 395_881_664,
    "microsoft/deberta-v3-xsmall": 70_682_112,
    "microsoft/deberta-v3-small": 141_304_320,
    "microsoft/deberta-v3-base": 183_831_552,
    "microsoft/deberta-v3-large": 434_012_160,
    "distilbert/distilbert-base-uncased": 66_985_530,
    "distilbert/distilbert-base-cased": 65_812_036,
    "distilbert/distilbert-base-multilingual-cased": 135_445_755,
    "google/electra-small-discriminator": 13_483_008,
    "google/electra-base-discriminator": 108_891_648,
    "google/electra-large-discriminator": 334_092_288,
    "albert/albert-base-v2": 11_221_680,
    "albert/albert-large-v2": 16_795_824,
    "albert/albert-xlarge-v2": 54_821_040,
    "albert/albert-xxlarge-v2": 206_368_944,
    "facebook/bart-base": 139_420_416,
    "facebook/bart-large-cnn": 406_290_432,
    "facebook/mbart-large-cc25": 610_851_840,
    "facebook/mbart-large-50-many-to-many-mmt": 610_879_488,
    "google/pegasus-large": 570_797_056,
    "google-t5/t5-small": 60_506_624,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "google-t5/t5-3b": 2_851_598_336,
    "google-t5/t5-11b": 11_307_321_344,
    "google/flan-t5-small": 76_961_152,
    "google/flan-t5-base": 247_577_856,
    "google/flan-t5-large": 783_150_080,
    "google/flan-t5-xl": 2_849_757_184,
    "google/flan-t5-xxl": 11_135_332_352,
    "google/mt5-small": 300_176_768,
    "google/mt5-base": 582_401_280,
    "google/mt5-large": 1_229_581_312,
    "google/mt5-xl": 3_742_619_648,
    "google/mt5-xxl": 12_921_057_280,
    "openai/whisper-tiny": 37_760_640,
    "openai/whisper-tiny.en": 37_760_256,
    "openai/whisper-base": 72_593_920,
    "openai/whisper-base.en": 72_593_408,
    "openai/whisper-small": 241_734_912,
    "openai/whisper-small.en": 241_734_144,
    "openai/whisper-medium": 763_857_920,
    "openai/whisper-medium.en": 763_856_896,
    "openai/whisper-large": 1_543_304_960,
    "openai/whisper-large-v2": 1_543_304_960,
    "openai/whisper-large-v3": 1_543_490_560,
    "openai/whisper-large-v3-turbo": 808_878_080,
    "google/vit-base-patch16-224": 86_567_656,
    "google/vit-base-patch16-384": 86_859_496,
    "google/vit-base-patch16-224-in21k": 86_389_248,
    "google/vit-large-patch16-224": 304_326_632,
    "google/vit-large-patch16-224-in21k": 304_351_232,
    "google/vit-huge-patch14-224-in21k": 632_404_480,
    "facebook/dinov2-small": 22_056_576,
    "facebook/dinov2-base": 86_580_480,
    "facebook/dinov2-large": 304_368_640,
    "facebook/dinov2-giant": 1_136_480_768,
    "microsoft/swin-tiny-patch4-window7-224": 28_288_354,
    "microsoft/swin-small-patch4-window7-224": 49_606_258,
    "microsoft/swin-base-patch4-window7-224": 87_768_224,
    "microsoft/swin-large-patch4-window7-224": 196_532_476,
    "facebook/convnext-tiny-224": 28_589_128,
    "facebook/convnext-small-224": 50_223_688,
    "facebook/convnext-base-224": 88_591_464,
    "facebook/convnext-large-224": 197_767_336,
    "google/siglip-base-patch16-224": 203_155_970,
    "google/siglip-large-patch16-256": 652_150_786,
    "google/siglip-large-patch16-384": 652_478_466,
    "google/siglip-so400m-patch14-384": 877_960_498,
    "openai/clip-vit-base-patch32": 151_277_313,
    "openai/clip-vit-base-patch16": 149_620_737,
    "openai/clip-vit-large-patch14": 427_616_513,
    "openai/clip-vit-large-patch14-336": 427_944_193,
}
"""Parameters of the published checkpoints."""

PRESETS = resources.files("snugfit.job").joinpath("presets")


def file_of(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(PRESETS.joinpath(*f"{name}.json".split("/")).read_bytes())
    return document


def first_of_each_architecture() -> set[str]:
    """Return the first preset of each architecture in `PARAMETERS`."""
    first = {file_of(name)["model_type"]: name for name in reversed(PARAMETERS)}
    return set(first.values())


@pytest.mark.parametrize("name", slow_but(PARAMETERS, first_of_each_architecture().__contains__))
def test_presets_have_their_published_parameters(name: str) -> None:
    from transformers import AutoModel

    model = Model.find(name)
    if "ForImageClassification" in "".join(named_by(model)):
        needs_task("image-classification")
    task = model.task and Task(model.task)
    with torch.device("meta"):
        if task and class_of(task, model.transformers_config(task, 2)).__name__ in named_by(model):
            job = Job(model=model, task=task, labels=1000, sequence_length=16)
            built = instantiate(job, dtype="float32", attention="sdpa")
        else:
            built = AutoModel.from_config(model.transformers_config(Task.CUSTOM, 2))
    assert sum(parameter.numel() for parameter in built.parameters()) == PARAMETERS[name]
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}


def named_by(model: Model) -> list[str]:
    return list(model.config.get("architectures", []))


def test_every_preset_is_counted_and_has_a_source_and_a_dtype() -> None:
    sources = json.loads(PRESETS.joinpath("sources.json").read_bytes())
    assert sorted(preset_names()) == sorted(PARAMETERS) == sorted(chain.from_iterable(sources.values()))
    assert {file_of(name)["dtype"] for name in preset_names()} == {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("qwen2.5-0.5b-base", "Qwen/Qwen2.5-0.5B"),
        ("Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Qwen3-14B", "Qwen/Qwen3-14B"),
        ("NousResearch/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-Base-2407"),
        ("google/gemma-3-4b-it", "google/gemma-3-4b-pt"),
        ("unsloth/gemma-2-9b-it", "google/gemma-2-9b-it"),
        ("unsloth/gemma-2-9b", "google/gemma-2-9b-it"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "meta-llama/Llama-3.1-8B"),
        ("unsloth/DeepSeek-R1-Distill-Qwen-7B", "Qwen/Qwen2.5-7B"),
        ("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-1025-7B"),
    ],
)
def test_tuned_mirrored_and_distilled_models_have_the_sizes_of_a_preset(name: str, base: str) -> None:
    assert Model.find(name) == Model.find(base)


def test_the_table_of_same_sizes_leads_to_presets() -> None:
    assert set(SAME_SIZES.values()) <= set(preset_names())
    assert not set(SAME_SIZES) & set(preset_names())


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B"),
    ],
)
def test_quantized_weights_are_refused_with_the_name_that_is_not(name: str, base: str) -> None:
    with pytest.raises(ModelError, match=f"quantized weights.* unquantized: {base}"):
        Model.find(name)


@pytest.mark.parametrize(
    "name",
    [
        "someone/Llama-3.1-8B",
        "unsloth/phi-4",
        "unsloth/Phi-3-mini-4k-instruct",
        "NousResearch/Hermes-3-Llama-3.1-8B",
        "Qwen/Qwen3-9B",
    ],
)
def test_a_model_of_other_sizes_has_no_preset_s(name: str) -> None:
    with pytest.raises(ModelError, match="No preset"):
        Model.find(name)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("Llama-3.1-8B", "causal-lm"),
        ("gemma-3-4b-pt", "causal-lm"),
        ("bert-base-uncased", "masked-lm"),
        ("flan-t5-base", "seq2seq-lm"),
        ("bart-large-cnn", "seq2seq-lm"),
        ("whisper-small", "speech-to-text"),
        ("vit-base-patch16-224", "image-classification"),
        ("dinov2-base", "image-classification"),
        ("bge-small-en-v1.5", "text-embedding"),
        ("deberta-v3-base", None),
    ],
)
def test_the_task_follows_from_the_architecture(name: str, task: str | None) -> None:
    assert Model.find(name).task == task


def test_a_command_says_the_task_and_the_sizes_that_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"model": "unsloth/Llama-3.2-1B-Instruct", "task": None}
    assert Request.read(flags).job.task is Task.CAUSAL_LM
    said = capsys.readouterr().err
    assert "model: unsloth/Llama-3.2-1B-Instruct has the same sizes as meta-llama/Llama-3.2-1B" in said
    assert "task: causal-lm, from the architecture" in said
    Request.read({"model": "Llama-3.2-1B", "task": "causal-lm"})
    assert capsys.readouterr().err == ""
    with pytest.raises(
        UsageError, match=r"can be trained for several\. Add --task, one of: sequence-classification, "
    ):
        Request.read({"model": "deberta-v3-base"})


def test_a_head_that_the_config_says_is_untied_is_so_with_and_without_weights(
    tmp_path: Path,
) -> None:
    """Test the head of FLAN-T5 and mT5. transformers ties it in a model that it builds, but not in one
    that it loads."""
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 100}
    facts = {"model_type": "t5", **sizes, "tie_word_embeddings": False, "is_encoder_decoder": True}
    job = Job(model=Model.from_config(facts, name="tiny"), task=Task.SEQ2SEQ_LM, sequence_length=8)
    built: Any = instantiate(job, dtype="float32", attention="eager")
    with torch.no_grad():
        built.lm_head.weight.mul_(2)
    built.save_pretrained(tmp_path)
    loaded: Any = instantiate(job, dtype="float32", attention="eager", weights=tmp_path)
    for model in (built, loaded):
        assert torch.equal(model.lm_head.weight, 2 * model.shared.weight)
        assert model.encoder.embed_tokens.weight is model.shared.weight


@pytest.mark.parametrize(
    ("origin", "name", "is_similar"),
    [
        ("preset", "bert-large-uncased", False),
        ("preset", "someone/a-tuned-bert", True),
        ("hub", "someone/a-tuned-bert", False),
    ],
)
def test_only_an_unknown_name_has_a_preset_of_the_same_sizes(
    origin: str, name: str, is_similar: bool
) -> None:
    model = replace(Model.find("bert-large-uncased"), origin=origin)
    request = Request.__new__(Request)
    vars(request).update(job=Job(model=model), model_name=name)
    assert request.uses_similar_preset is is_similar
