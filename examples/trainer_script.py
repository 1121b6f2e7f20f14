"""A script as it is written every day: examples/trainer_script.sh asks about it, and never runs it."""

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

name = "answerdotai/ModernBERT-base"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
reviews = load_dataset("stanfordnlp/imdb").map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=512), batched=True
)
arguments = TrainingArguments(
    output_dir="reviews",
    per_device_train_batch_size=64,
    learning_rate=2e-5,
    num_train_epochs=3,
    bf16=True,
    dataloader_prefetch_factor=2,
    evaluation_strategy="epoch",
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=reviews["train"],
    eval_dataset=reviews["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
