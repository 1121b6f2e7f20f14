"""Repositories of diffusers and timm, whose training steps an example file builds."""

from snugfit.job.repositories import OtherRepository

_ADVICE = (
    "Write example(batch_size, device), which builds it and returns its training step. Then run: snugfit "
    "predict --example FILE.py."
)

DIFFUSERS = OtherRepository(
    contents="a pipeline or a part of diffusers",
    id_pattern=r"stabilityai/(stable-diffusion|sdxl|sd-)[\w.-]*|black-forest-labs/FLUX[\w.-]*"
    r"|(runwayml|CompVis|stable-diffusion-v1-5)/stable-diffusion[\w.-]*|diffusers/[\w.-]+",
    files="model_index.json",
    config_key="_diffusers_version",
    advice=_ADVICE,
)

TIMM = OtherRepository(
    contents="a model of timm", id_pattern=r"timm/[\w.-]+", config_key="pretrained_cfg", advice=_ADVICE
)
