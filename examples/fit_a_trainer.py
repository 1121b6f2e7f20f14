"""A Trainer under snugfit in two more lines, on a small task that comes with the package (seconds on a CPU).

snugfit.fit plans for the GPU that it finds, or trains under the recipe that it is given. A run that is killed
goes on from its last checkpoint when the same script is started again, and when memory runs out the step is
taken again with a finer cut of the same batch.
"""

from transformers import Trainer, TrainingArguments

import snugfit  # the first line
from snugfit.features.digits import digits, digits_model

arguments = TrainingArguments(
    output_dir="snugfit-examples/digits",
    per_device_train_batch_size=32,
    max_steps=20,
    logging_steps=5,
    disable_tqdm=True,
    dataloader_pin_memory=False,
    report_to="none",
)
train, _ = digits()
trainer = Trainer(digits_model(), arguments, train_dataset=train)
trainer = snugfit.fit(trainer, "micro_batches(2)")  # the second line
print(f"steps taken: {trainer.train().global_step}")
