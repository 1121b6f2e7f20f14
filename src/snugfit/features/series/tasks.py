"""The task of models that predict the next values of time series."""

from __future__ import annotations

from snugfit.job.inputs import AddedTask

SERIES = AddedTask(
    name="time-series",
    head=("AutoModelForTimeSeriesPrediction", "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES"),
    classes={
        "autoformer": "AutoformerForPrediction",
        "informer": "InformerForPrediction",
        "patchtsmixer": "PatchTSMixerForPrediction",
        "patchtst": "PatchTSTForPrediction",
        "time_series_transformer": "TimeSeriesTransformerForPrediction",
    },
    elsewhere=("time-series-forecasting",),
)
"""The prediction of time series. transformers' auto class lists TimesFM alone."""
