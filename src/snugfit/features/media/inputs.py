"""Shapes of synthetic pictures and sounds, read from a model's config.

A picture has the size in the config. A sound has 30 seconds, the fixed input of Whisper's encoder. Other
feature extractors get the same length. One sample is one of these (C channels, H x W pixels, M mel bins, F
frames of 10 ms, P patches, D numbers of a patch or a frame):

| the config of the encoder has             | input                 | shape of a sample              |
|-------------------------------------------|-----------------------|--------------------------------|
| image_size, or none (networks take any)   | pixel_values          | (C, H, W)                      |
| num_patches (SigLIP 2)                    | pixel_values          | (P, D)                         |
| num_mel_bins and max_source_positions     | input_features        | (M, F), F = 2 x positions      |
| num_mel_bins, stacked or subsampled after | input_features        | (F, M), or (M, F) in `BINS_FIRST` |
| feature_projection_input_dim, input_dim   | input_features        | (F / 2, D), two frames stacked |
| none of these                             | input_values          | (samples), or (1, samples)     |
| num_codebooks (Kyutai)                    | input_ids             | (frames, 1 + codebooks)        |

A model with a decoder, such as Whisper, takes the labels as a separate input. A language model with sound
input takes the sound in the place of tokens. Their number depends on its code, and `_TOKENS` has it by
architecture. Its batch is input_ids (B, A + T), of which the first A are placeholders of the sound. In
seq2seq-lm there are S text tokens between the two. Labels are the last T tokens, and -100 before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugfit.errors import JobError
from snugfit.features.media import tasks
from snugfit.features.media.picture_texts import NestedPictureTexts, PictureTexts
from snugfit.job.batch import IGNORED, Batch, BatchShapes, SampleInputs
from snugfit.job.inputs import ModelInputs
from snugfit.job.job import Job, Task

if TYPE_CHECKING:
    import torch

USUAL_PIXELS = 224
"""Height and width in pixels of pictures in networks for ImageNet."""

UNLABELLED = 255
"""Class of pixels that losses ignore: the default of `semantic_loss_ignore_index` in transformers."""

SECONDS = 30
FRAMES = 100 * SECONDS
"""Number of frames in a spectrogram of 30 seconds with a hop of 10 ms, as in transformers' feature extractors
for speech.
"""

SAMPLE_RATE = 16_000
"""Samples per second of feature extractors for speech, unless a config has another rate."""

BINS_FIRST = frozenset({"glmasr", "qwen3_asr", "voxtral_realtime"})
"""Model types whose spectrograms have mel bins as the first dimension, although their configs have no source
positions.
"""

STACKED_FRAMES = 6
"""Distance of stacked frames in FunASR's extractor. It stacks seven frames, once every six frames
(`stride_lfr`).
"""

PIANO_FRAMES = 22_050 * SECONDS // 1_024
"""Number of frames in Pop2Piano's spectrogram of 30 seconds: 22,050 Hz and a hop of 1,024 samples."""


VIBEVOICE_SAMPLES = 24_000 * SECONDS
"""Number of samples in 30 seconds for VibeVoice's extractor, which takes 24,000 Hz and returns one channel.
"""

MIMI_HOP = 8
"""Number of 10 ms frames in one frame of Mimi's codec, which has 12.5 frames a second.

A text token and codes share each codec frame.
"""


@dataclass(frozen=True)
class PictureInput(SampleInputs):
    """The shape of a model's picture input, which creates synthetic batches."""

    shape: tuple[int, ...]
    """Shape of one picture: (C, H, W), or (P, D) for patches."""

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return pictures (B, C, H, W), or patches (B, P, D) with their mask and their height and width."""
        import torch

        batch = {"pixel_values": torch.randn(samples, *self.shape, generator=generator, device="cpu")}
        if len(self.shape) == 2:
            # SigLIP 2 also takes the numbers of rows and columns of patches.
            rows = math.isqrt(self.shape[0])
            ones = torch.ones(samples, self.shape[0], dtype=torch.long, device="cpu")
            batch["pixel_attention_mask"] = ones
            sides = [[rows, self.shape[0] // rows]]
            batch["spatial_shapes"] = torch.tensor(sides * samples, device="cpu")
        return batch


@dataclass(frozen=True)
class SegmentedPictureInput(PictureInput):
    """The shape of a model's picture input, with a class for each pixel."""

    def targets(
        self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator
    ) -> Mapping[str, Any]:
        """Return random classes of pixels, (B, H, W)."""
        import torch

        size = (samples, *self.shape[1:])
        labels = torch.randint(shapes.job.labels, size, generator=generator, device="cpu")
        return {"labels": labels}


@dataclass(frozen=True)
class VideoInput(SampleInputs):
    """The shape of a model's video input, which creates synthetic batches."""

    name: str
    """Name of the argument of the model's `forward`."""
    shape: tuple[int, int, int, int]
    """Shape of one video, (F, C, H, W)."""

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return videos (B, F, C, H, W)."""
        import torch

        return {self.name: torch.randn(samples, *self.shape, generator=generator, device="cpu")}


@dataclass(frozen=True)
class SoundInput(SampleInputs):
    """The shape of a model's sound input, which creates synthetic batches."""

    name: str
    """Name of the argument of the model's `forward`."""
    shape: tuple[int, ...]
    """Shape of one sound, as in the class's table."""
    mask: str = ""
    """Name of the argument that masks padding frames; empty if the model needs no mask."""
    tokens: int = 0
    """Number of placeholder tokens in a language model's sequence that the sound replaces; 0 for an
    encoder-decoder model.
    """
    token: int = 0
    """Id of the placeholder token that the sound replaces."""
    added: bool = False
    """True if the sound is added to the tokens' embeddings, one for one, and replaces no placeholders."""

    codes: int = 0
    """Number of distinct codes of an audio codec, which replace the wave; 0 without a codec."""
    frames_first: bool = False
    """True if frames are the first dimension of a sample, before mel bins."""

    @property
    def frames(self) -> int:
        """Return the number of frames of a sample, the length of its attention mask."""
        return self.shape[0 if self.frames_first else -1]

    def inputs(self, shapes: BatchShapes, samples: int, generator: torch.Generator) -> Batch:
        """Return a batch of synthetic sounds, and for a language model with sound input its tokens (B, A +
        T).
        """
        import torch

        # A codec's input has codes instead of a wave.
        if self.codes:
            shape = (samples, *self.shape)
            return {self.name: torch.randint(self.codes, shape, generator=generator, device="cpu")}
        waves = torch.randn(samples, *self.shape, generator=generator, device="cpu")
        batch = {self.name: waves}
        if self.mask:
            batch[self.mask] = torch.ones(samples, self.frames, dtype=torch.long, device="cpu")
        if not self.tokens:
            return batch
        if self.added:
            return batch | {"input_ids": shapes.ids(samples, self.tokens, generator)}
        job, targets = shapes.job, shapes.job.target_length
        # Under seq2seq-lm, text tokens are between the sound and the target.
        target_length = job.sequence_length if job.task is Task.SEQ2SEQ_LM else 0
        ids = shapes.ids(samples, target_length + targets, generator)
        # A random placeholder token would mark a sound that does not exist.
        ids[ids == self.token] = (self.token + 1) % shapes.vocabulary
        ids = torch.cat([torch.full((samples, self.tokens), self.token, device="cpu"), ids], dim=1)
        if not job.padding:
            return batch | {"input_ids": ids}
        mask = torch.ones_like(ids)
        padding = shapes.padding_of(ids[:, -targets:])
        ids[:, -targets:][:, padding] = shapes.pad_token
        mask[:, -targets:][:, padding] = 0
        return batch | {"input_ids": ids, "attention_mask": mask}

    def targets(
        self, shapes: BatchShapes, samples: int, inputs: Batch, generator: torch.Generator
    ) -> Mapping[str, Any]:
        """Return the labels of a synthetic batch.

        A codec's labels are its stream of text. A language model with sound input has labels (B, A + T): its
        last T tokens, or all of them.
        """
        if self.codes:
            return {"labels": inputs[self.name][..., 0].clone()}
        if not self.tokens:
            return super().targets(shapes, samples, inputs, generator)
        labels = inputs["input_ids"].clone()
        # The loss covers only the target. A sound that is added has a label for each token but the first.
        labels[:, : 1 if self.added else -shapes.job.target_length] = IGNORED
        if "attention_mask" in inputs:
            labels[inputs["attention_mask"] == 0] = IGNORED
        return {"labels": labels}


def pixels(config: Any) -> tuple[int, ...]:
    """Return the shape of one picture for a model with this config, (C, H, W) or (P, D). Configs of
    convolutional networks have no size, because these networks accept any.
    """
    vision = config if getattr(config, "image_size", None) else getattr(config, "vision_config", config)
    channels = getattr(vision, "num_channels", 3)
    if patches := getattr(vision, "num_patches", None):
        return patches, channels * vision.patch_size**2
    size = getattr(vision, "image_size", None) or USUAL_PIXELS
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return channels, height, width


def video(config: Any) -> VideoInput:
    """Return the `VideoInput` of a model with this config, whose keys have the frames and their size."""
    frames = getattr(config, "frames_per_clip", None) or getattr(config, "num_frames", None) or 16
    side = getattr(config, "crop_size", None) or getattr(config, "image_size", None) or USUAL_PIXELS
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_chans", None) or 3
    name = "pixel_values_videos" if config.model_type in _VIDEOS_BY_NAME else "pixel_values"
    return VideoInput(name, (frames, channels, height, width))


_VIDEOS_BY_NAME = frozenset({"vjepa2", "videoprism_vision_model"})
"""Model types whose argument for videos has a name of its own."""


def sound(config: Any) -> SoundInput | None:
    """Return the `SoundInput` of a model with this config; None for a model without a known sound input."""
    model_type, part = config.model_type, _encoder(config)
    if model_type in _TOKENS:
        token = getattr(config, "audio_token_id", None)
        tokens = _TOKENS[model_type](config, part)
        mask, shape = _MASKS.get(model_type, "input_features_mask"), _features(model_type, part)
        if not shape:
            return SoundInput("input_values", (1, VIBEVOICE_SAMPLES), mask, tokens, token or 0)
        # Configs with source positions belong to Whisper, whose features have mel bins first.
        bins_first = model_type in BINS_FIRST or getattr(part, "max_source_positions", None) is not None
        added = model_type == ADDED
        return SoundInput("input_features", shape, mask, tokens, token or 0, added, 0, not bins_first)
    if model_type == "kyutai_speech_to_text":
        streams = (FRAMES // MIMI_HOP, 1 + config.num_codebooks)
        return SoundInput("input_ids", streams, codes=min(config.vocab_size, config.codebook_vocab_size))
    if model_type == "pop2piano":
        return SoundInput("input_features", (PIANO_FRAMES, config.d_model))
    if not config.is_encoder_decoder or model_type == "dia":  # Dia generates speech, so its input is text
        return None
    shape = _features(model_type, part)
    return SoundInput("input_features", shape) if shape else SoundInput("input_values", _wave(part))


def has_sound_embeddings(model_type: str) -> bool:
    """Return True for a language model in which sound embeddings replace placeholder tokens."""
    return model_type in _TOKENS


_ENCODERS = ("audio_config", "encoder_config", "encoder", "acoustic_tokenizer_encoder_config", "asr_config")
"""Keys of configs whose value is the config of a sound encoder."""


def _encoder(config: Any) -> Any:
    """Return the config of the sound encoder; of several nested ones, the innermost."""
    for key in _ENCODERS:
        # An integer under this key is a size, not a config.
        if (part := getattr(config, key, None)) is not None and not isinstance(part, int):
            return _encoder(part)
    return config


def sound_of_encoder(config: Any, seconds: float) -> SoundInput:
    """Return the `SoundInput` of an encoder that takes sounds of this length. Whisper and AST take a fixed
    number of frames.
    """
    part = _encoder(config)
    if config.model_type == "audio-spectrogram-transformer":
        return SoundInput("input_values", (config.max_length, config.num_mel_bins))
    shape = _features(config.model_type, part, round(100 * seconds))
    return SoundInput("input_features", shape) if shape else SoundInput("input_values", _wave(part, seconds))


def _features(model_type: str, part: Any, frames: int = FRAMES) -> tuple[int, ...]:
    """Return the shape of a spectrogram with this number of frames of 10 ms; empty if the model takes the
    waveform itself.
    """
    bins, positions = getattr(part, "num_mel_bins", None), getattr(part, "max_source_positions", None)
    stacked = getattr(part, "feature_projection_input_dim", None) or getattr(part, "input_dim", None)
    if getattr(part, "conv_dim", None):  # wav2vec 2.0 and similar models have convolutions over the wave
        return ()
    if stacked:
        return frames // 2, stacked
    if bins and positions:
        return bins, 2 * positions
    if stack := getattr(part, "num_stacked_frames", None):
        return frames // STACKED_FRAMES, stack * part.num_mel_bins
    bins = bins or getattr(part, "input_feat_per_channel", 0) * getattr(part, "input_channels", 1)
    shape = (bins, frames) if model_type in BINS_FIRST else (frames, bins)
    return shape if bins else ()


def _wave(part: Any, seconds: float = SECONDS) -> tuple[int]:
    return (round(seconds * (getattr(part, "sampling_rate", None) or SAMPLE_RATE)),)


def _pooled_tokens(config: Any, part: Any) -> int:
    """Return the number of Whisper's tokens: its convolutions halve the frames, and a pooling halves them
    again.
    """
    return int(part.max_source_positions) // 2


def _merged_tokens(config: Any, part: Any) -> int:
    """Return the number of tokens if Whisper's convolutions halve the frames, and four of those form one
    token.
    """
    return FRAMES // 8


_TOKENS: Mapping[str, Callable[[Any, Any], int]] = {
    "audioflamingo3": _pooled_tokens,
    "fun_asr_nano": lambda config, ear: FRAMES // STACKED_FRAMES,
    "glmasr": _merged_tokens,
    "granite_speech": lambda config, ear: _window_tokens(config),
    "granite_speech_plus": lambda config, ear: _window_tokens(config),
    "moss_transcribe_diarize": lambda config, ear: math.ceil(
        ear.max_source_positions / config.audio_merge_size
    ),
    "musicflamingo": _pooled_tokens,
    "nemo_speechlm": _merged_tokens,
    "qwen2_audio": _pooled_tokens,
    "qwen3_asr": lambda config, ear: FRAMES // (2 * ear.n_window) * 13,
    "vibevoice": lambda config, ear: math.ceil(VIBEVOICE_SAMPLES / ear.hop_length),
    "vibevoice_asr": lambda config, ear: math.ceil(VIBEVOICE_SAMPLES / ear.hop_length),
    "voxtral": lambda config, ear: int(ear.max_source_positions * ear.hidden_size / ear.intermediate_size),
    "voxtral_realtime": lambda config, ear: FRAMES // config.audio_length_per_tok,
}
"""Functions that return the number of tokens for 30 seconds of sound, by model type, as `get_audio_features`
computes it.
"""


def _window_tokens(config: Any) -> int:
    """Return the number of Granite Speech's tokens: `window_size / downsample_rate` for each window of
    frames.
    """
    windows = math.ceil(FRAMES / 2 / config.window_size)
    return int(windows * (config.window_size // config.downsample_rate))


_MASKS = {
    "granite_speech": "", "granite_speech_plus": "", "voxtral": "", "voxtral_realtime": "",
    "qwen2_audio": "feature_attention_mask", "vibevoice": "padding_mask", "vibevoice_asr": "",
}  # fmt: skip
"""Name of the argument that masks frames, by model type, if it is not the usual one; empty for none."""

ADDED = "voxtral_realtime"
"""Model type that adds a sound to its tokens' embeddings, one for one, and inserts no tokens for it."""


class Pictures(ModelInputs):
    """Input type of models for pictures, with synthetic batches and labels."""

    task = tasks.PICTURES.name
    takes_tokens = False
    has_classes = True

    def of_job(self, job: Job, config: Any) -> PictureInput:
        """Return the `PictureInput` with the shape of the model's pictures."""
        return PictureInput(pixels(config))


class SegmentedPictures(ModelInputs):
    """Input type of models that classify each pixel of a picture, with synthetic batches and labels."""

    task = tasks.SEGMENTATION.name
    takes_tokens = False
    has_classes = True

    def of_job(self, job: Job, config: Any) -> SegmentedPictureInput:
        """Return the `SegmentedPictureInput` with the shape of the model's pictures. Raises `JobError` for a
        single class.
        """
        if job.labels < 2:
            raise JobError(f"labels is {job.labels}; {job.task} needs 2 classes or more. Set labels: 150.")
        return SegmentedPictureInput(pixels(config))

    def label_items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of pixels with a class. The loss is their mean."""
        return int((batch["labels"] != UNLABELLED).sum())

    def correct(self, out: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return True for each labelled pixel whose class is found: the pixel accuracy of arXiv 1411.4038,
        section 5. Logits (B, C, h, w) are scaled to the labels' size (B, H, W) first.
        """
        from torch.nn.functional import interpolate

        labels: torch.Tensor = batch["labels"]
        scaled = interpolate(out.logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
        return (scaled.argmax(1) == labels)[labels != UNLABELLED]


class Videos(ModelInputs):
    """Input type of models that classify videos, with synthetic batches and labels."""

    task = tasks.VIDEOS.name
    takes_tokens = False
    has_classes = True

    def of_job(self, job: Job, config: Any) -> VideoInput:
        """Return the `VideoInput` with the shape of the model's videos."""
        return video(config)


class Sounds(ModelInputs):
    """Input type of models for sounds, alone or among tokens, with synthetic batches and labels."""

    task = tasks.SOUNDS.name
    takes_tokens = False
    has_target = True

    def serves(self, task: str, architecture: str) -> bool:
        """Return True if models of this architecture take sounds and the task has text labels."""
        return task == self.task or (task == Task.SEQ2SEQ_LM and architecture in _TOKENS)

    def complete(self, config: Any) -> None:
        """Set the config's placeholder token for sounds if it is missing. Configs on the hub have one, and no
        memory depends on its value.
        """
        if config.model_type in _TOKENS and getattr(config, "audio_token_id", 0) is None:
            config.audio_token_id = 0

    def of_job(self, job: Job, config: Any) -> SoundInput:
        """Return the `SoundInput` with the shape of the model's sounds.

        Raises `JobError` if the shape is unknown.
        """
        sound_input = sound(config)
        if sound_input is None:
            raise JobError(
                f"{job.model.name} ({job.model.architecture}): snugfit cannot make synthetic audio for it "
                f"in {job.task}. Give the model itself with an example batch: Model.from_module(module, "
                "example)."
            )
        return sound_input


class ClassifiedSounds(ModelInputs):
    """Input type of encoders that classify sounds, with synthetic batches and labels."""

    task = tasks.SOUND_CLASSES.name
    takes_tokens = False
    has_classes = True
    has_seconds = True

    def of_job(self, job: Job, config: Any) -> SoundInput:
        """Return the `SoundInput` with the shape of the job's sounds."""
        return sound_of_encoder(config, job.seconds)


class TranscribedSounds(ModelInputs):
    """Input type of encoders that are trained by connectionist temporal classification (CTC)."""

    task = tasks.CTC.name
    takes_tokens = False
    has_target = True
    has_seconds = True

    def complete(self, config: Any) -> None:
        """Set the loss to the mean over samples, as transformers' `run_speech_recognition_ctc.py` does. The
        sum, the default of some configs, is another loss in micro-batches.
        """
        if hasattr(config, "ctc_loss_reduction"):
            config.ctc_loss_reduction = "mean"

    def of_job(self, job: Job, config: Any) -> SoundInput:
        """Return the `SoundInput` with the shape of the job's sounds."""
        return sound_of_encoder(config, job.seconds)

    def label_items(self, batch: Mapping[str, Any]) -> int:
        """Return the number of samples. The loss of each is divided by its own number of labels."""
        return len(batch["labels"])


PICTURES, SOUNDS = Pictures(), Sounds()
PICTURE_TEXTS, NESTED_PICTURE_TEXTS = PictureTexts(), NestedPictureTexts()
SEGMENTED_PICTURES, VIDEOS = SegmentedPictures(), Videos()
CLASSIFIED_SOUNDS, TRANSCRIBED_SOUNDS = ClassifiedSounds(), TranscribedSounds()
