"""Conversion of a sound to the model's input, by decoding and by the model's own feature extractor.

Python itself reads PCM `.wav`, and soundfile reads other files where it is installed. Several channels are
averaged. A sound at another sampling rate raises an error with advice. At the wrong rate a model would
recognize other words. Good resampling needs a library, and should run once and not in every epoch. A sound
longer than the model's limit also raises an error. It is not cut, because its text would remain whole.
"""

from __future__ import annotations

import importlib
import io
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, final

from snugfit.errors import UsageError, one_line
from snugfit.features.media.files import MediaEntry, shape_text

if TYPE_CHECKING:
    import numpy as np
    import torch


class Sound(NamedTuple):
    """A decoded sound of one channel."""

    samples: np.ndarray
    """Samples in [-1, 1], (N,) of fp32."""

    rate: Any
    """Samples per second: an integer, or the row's own value if no rate is required."""


@final
@dataclass(frozen=True, kw_only=True)
class SoundPreprocessor:
    """Converts the sounds of samples to a model's input, one at a time."""

    extractor: Any
    """The model's feature extractor of transformers."""

    shape: tuple[int, ...] | None
    """Shape (M, F) that the job was planned for; None if lengths differ from sound to sound."""

    seconds: float | None = None
    """Longest sound in seconds that the job was planned for; None if the extractor alone has a limit."""

    @property
    def input_name(self) -> str:
        """Name of the model's input: `input_features`, or `input_values`."""
        name: str = self.extractor.model_input_names[0]
        return name

    def input_of(self, entry: MediaEntry) -> np.ndarray:
        """Return a sound's features, (M, F) or (samples) of fp32. Raises `UsageError` that names the row and
        its file.
        """
        sound = _decode(entry)
        self._refuse(sound, entry)
        try:
            extracted = self.extractor(sound.samples, sampling_rate=sound.rate, return_tensors="np")
            features: np.ndarray = extracted[self.input_name][0]
        except Exception as error:  # a user's feature extractor may raise any exception
            raise UsageError(
                f"{entry.name}: the feature extractor fails on it ({one_line(error)}). Replace the "
                "file, or remove its row."
            ) from error
        if self.shape is not None and features.shape != self.shape:
            raise UsageError(
                f"{entry.name}: the feature extractor makes {shape_text(features.shape)} of it, but the "
                f"model takes {shape_text(self.shape)}. Use the model's own feature extractor."
            )
        return features.astype("float32", copy=False)

    def pad(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Pad the features of sounds to one length. Return them with an attention mask."""
        lists = {self.input_name: [features.numpy() for features in inputs]}
        # Some wav2vec 2.0 models were trained without masks, and their extractors return none.
        masks = None if self.seconds is not None else True
        padded = self.extractor.pad(lists, padding=True, return_attention_mask=masks, return_tensors="pt")
        return dict(padded)

    def raw_bytes(self, entry: MediaEntry) -> bytes:
        """Return a sound's bytes for a checksum of the dataset: the file's bytes, or the decoded sound."""
        content = entry.content()
        return content if content is not None else _in_memory(entry).samples.tobytes()

    def _refuse(self, sound: Sound, entry: MediaEntry) -> None:
        count, rate, model_rate = len(sound.samples), sound.rate, self.extractor.sampling_rate
        if rate != model_rate:
            raise UsageError(
                f"{entry.name}: {rate:,} samples per second, but the model takes {model_rate:,}. snugfit "
                f"does not resample. Do it once for all files: ffmpeg -i IN -ac 1 -ar {model_rate} OUT.wav."
            )
        if not count:
            raise UsageError(f"{entry.name}: the audio is empty. Replace the file, or remove its row.")
        most = getattr(self.extractor, "n_samples", None)
        if self.seconds is not None and count / rate > self.seconds:
            raise UsageError(
                f"{entry.name}: {count / rate:.1f} seconds, but the job was planned for {self.seconds:g}. "
                f"Cut the audio, remove the row, or set seconds: {math.ceil(count / rate)}."
            )
        if most and count > most:
            raise UsageError(
                f"{entry.name}: {count / rate:.1f} seconds, but the model takes at most {most / rate:.1f}. "
                "Cut the audio and its text, or remove the row."
            )


def _decode(entry: MediaEntry) -> Sound:
    """Return the decoded sound of a row, from a file or from memory."""
    content = entry.content()
    if content is not None:
        return _read(content, entry)
    samples, rate = _in_memory(entry)
    if isinstance(rate, bool) or not isinstance(rate, Integral) or rate < 1:
        raise UsageError(
            f'{entry.location}: audio in memory needs its sampling rate: {{"array": ..., "sampling_rate": '
            "16000}, or a column sampling_rate."
        )
    return Sound(samples, int(rate))


def _in_memory(entry: MediaEntry) -> Sound:
    value: Any = entry.value
    if hasattr(value, "get_all_samples"):  # torchcodec's decoder, which datasets returns
        decoded = value.get_all_samples()
        # torchcodec returns (channels, samples).
        return Sound(_array(decoded.data.numpy().mean(axis=0), entry), decoded.sample_rate)
    if isinstance(value, Mapping):
        return Sound(_array(value.get("array"), entry), value.get("sampling_rate"))
    return Sound(_array(value, entry), entry.rate)


def _array(value: Any, entry: MediaEntry) -> np.ndarray:
    """Return an already decoded sound, (N) of floats or of 16-bit integers, as fp32."""
    import numpy as np

    try:
        sound = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        sound = np.asarray(None)
    # Samples of 16 bits become numbers in [-1, 1).
    if sound.dtype == np.int16:
        sound = sound / np.float32(1 << 15)
    if sound.ndim != 1 or sound.dtype.kind != "f":
        shape = f"one of {sound.dtype} and the shape {sound.shape}" if sound.ndim else type(value).__name__
        raise UsageError(
            f"{entry.location}: audio must be a path, a file's bytes, or an array (N) of floats in [-1, 1] "
            f"with its sampling_rate, not {shape}."
        )
    return sound.astype(np.float32)


def _read(content: bytes, entry: MediaEntry) -> Sound:
    """Return the decoded sound in a file's bytes."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            return _pcm(file, entry)
    # The file is not a PCM `.wav` file, but soundfile may be able to read it.
    except (wave.Error, EOFError) as error:
        message = str(error) or "it ends too early"
    if not content:
        raise UsageError(f"{entry.name}: the file is empty. Replace it, or remove its row.")
    # A RIFF file of a known format is broken, while soundfile may read other formats.
    if content.startswith(b"RIFF") and not message.startswith("unknown format"):
        raise UsageError(f"{entry.name}: this .wav is broken ({message}). Replace it, or remove its row.")
    return _by_soundfile(content, entry, message)


def _pcm(file: wave.Wave_read, entry: MediaEntry) -> Sound:
    import numpy as np

    channels, width, rate, count, *_ = file.getparams()
    content = file.readframes(count)
    if len(content) != count * channels * width:
        raise UsageError(
            f"{entry.name}: the file ends too early: {len(content) // (channels * width):,} of "
            f"{count:,} samples. Replace it, or remove its row."
        )
    if width == 3:  # stored as the upper three bytes of four
        wide = np.zeros((len(content) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3)
        values = wide.view("<i4").ravel()
    else:
        values = np.frombuffer(content, dtype={1: "u1", 2: "<i2", 4: "<i4"}[width])
    bits = 32 if width == 3 else 8 * width
    sound = values.astype(np.float64) / (1 << (bits - 1)) - (width == 1)  # 8-bit samples are unsigned
    return Sound(sound.reshape(-1, channels).mean(axis=1).astype(np.float32), rate)


def _by_soundfile(content: bytes, entry: MediaEntry, wav_error: str) -> Sound:
    """Decode a file that is not a PCM `.wav` by the package soundfile. `wav_error` is the error of Python's
    own reader.
    """
    try:
        soundfile = importlib.import_module("soundfile")
    except ImportError:
        raise UsageError(
            f"{entry.name}: this is not a PCM .wav ({wav_error}). Other audio needs soundfile, which is not "
            "installed. Try: pip install soundfile"
        ) from None
    try:
        sound, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except Exception as error:  # libsndfile's error
        raise UsageError(
            f"{entry.name}: this audio cannot be read ({one_line(error)}). Replace the file, or remove "
            "its row."
        ) from None
    return Sound(sound.mean(axis=1), int(rate))
