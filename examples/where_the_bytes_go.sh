#!/usr/bin/env bash
# You teach how training uses a GPU's memory: what the bytes are for, when they are alive, and what each
# technique does to them. GPT-2 on a T4, as in a free notebook. Every command takes seconds.
#
#     source .venv/bin/activate
#     examples/where_the_bytes_go.sh
#
# MODEL may be another language model.
set -u
here=$(dirname "$0")
model=${MODEL:-gpt2}
job=(--task causal-lm --batch-size 8 --sequence-length 512 --gpu t4)
mkdir -p snugfit-examples

# 1. Bytes by kind and by module, their curve over one step, and the moment of the peak. The page has the
#    pictures for a lecture, light and dark, and needs no network.
snugfit predict "$model" "${job[@]}" --html snugfit-examples/step.html

# 2. Techniques beside each other: what each of them saves, and what it costs in time.
snugfit predict "$model" "${job[@]}" --recipe plain --compare fp16 --compare every_layer \
    --compare "micro_batches(4)" --compare adafactor --html snugfit-examples/techniques.html

# 3. Evaluation keeps no activations: the same batch, and most of the bytes are gone.
snugfit predict "$model" "${job[@]}" --phase evaluate

# 4. The steady step for https://ui.perfetto.dev. With a file that ends in .pickle it is every allocation, for
#    https://pytorch.org/memory_viz.
snugfit predict "$model" "${job[@]}" --trace snugfit-examples/step.json > /dev/null

# 5. What a loop of your own takes, watched while it runs: on a GPU its memory too.
python "$here/watch_a_loop.py"
