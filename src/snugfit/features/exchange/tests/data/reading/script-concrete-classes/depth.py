from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments
import torch
from transformers import AutoModelForDepthEstimation
model = AutoModelForDepthEstimation.from_pretrained("bert-base-cased")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=8)
Trainer(model=model, args=args).train()
