#!/usr/bin/env bash
# You have read Hugging Face's "Efficient training on a single GPU": BERT-large on a V100, one technique after
# the other. What does each of them do to the memory, and do the published figures come out?
#
#     source .venv/bin/activate
#     examples/hf_guide.sh
#
# MODEL may be another for the single rows.
set -u
model=${MODEL:-bert-large-uncased}
mkdir -p snugfit-examples

# 1. One row of the guide's table, with the reasons (a few seconds).
snugfit predict "$model" --task sequence-classification --gpu v100-16gb \
    --recipe "fp16 + every_layer + micro_batches(4)"

# 2. A few of its techniques, side by side.
snugfit predict "$model" --task sequence-classification --gpu v100-16gb \
    --recipe plain --compare "micro_batches(4)" --compare every_layer --compare fp16 --compare adafactor

# 3. All of it: the tables, the published figures beside what is predicted under the software of 2022, the plot
#    (guide.svg, guide.png), and a page that needs no network. Half a minute.
snugfit guide --gpu v100-16gb --output snugfit-examples/guide --html snugfit-examples/guide.html
