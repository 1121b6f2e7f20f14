"""The training tasks of models for pictures, videos and sounds."""

from __future__ import annotations

from snugfit.job.inputs import AddedTask

PICTURES = AddedTask(
    name="image-classification",
    head=("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
)
SOUNDS = AddedTask(
    name="speech-to-text",
    head=("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    elsewhere=("automatic-speech-recognition",),
)
SOUND_CLASSES = AddedTask(
    name="audio-classification",
    head=("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
)
CTC = AddedTask(
    name="ctc",
    head=("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES"),
    elsewhere=("automatic-speech-recognition",),
)
SEGMENTATION = AddedTask(
    name="semantic-segmentation",
    head=("AutoModelForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"),
    elsewhere=("image-segmentation",),
)
VIDEOS = AddedTask(
    name="video-classification",
    head=("AutoModelForVideoClassification", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES"),
)
PICTURE_TEXTS = AddedTask(
    name="image-text-to-text",
    head=("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    elsewhere=("image-to-text", "visual-question-answering"),
)
