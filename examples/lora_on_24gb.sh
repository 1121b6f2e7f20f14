#!/usr/bin/env bash
# One RTX 4090 (24 GB), an 8B model, LoRA, 16 samples of 2048 tokens in each optimizer step.
# Answers: does it fit, under which recipe is it fastest, and how is it trained? No GPU is needed to ask.
#
#     source .venv/bin/activate
#     examples/lora_on_24gb.sh
#
# MODEL, GPU and KEEP may be others: MODEL=Qwen/Qwen3-4B GPU="rtx 3060" examples/lora_on_24gb.sh
set -u
model=${MODEL:-meta-llama/Llama-3.1-8B}
gpu=${GPU:-rtx 4090}
keep=${KEEP:-lora}
job=(--task causal-lm --batch-size 16 --sequence-length 2048)
mkdir -p snugfit-examples

# 1. Plain LoRA, all 16 samples at once. Exit code 3 means: it does not fit.
snugfit predict "$model" "${job[@]}" --gpu "$gpu" --recipe lora
echo "exit code $?"

# 2. What most people try next. Exit code 0: it fits, and the answer says what is left.
snugfit predict "$model" "${job[@]}" --gpu "$gpu" --recipe "lora + bf16 + every_layer + micro_batches(16)"
echo "exit code $?"

# 3. The fastest recipe that fits and leaves the headroom. LoRA stays because --keep names it, AdamW stays
#    because another optimizer would learn differently (--fidelity learns allows that).
snugfit plan "$model" "${job[@]}" --gpu "$gpu" --keep "$keep"

# 4. The same plan for a script of your own. It is remembered, so this takes a second.
snugfit plan "$model" "${job[@]}" --gpu "$gpu" --keep "$keep" --json > snugfit-examples/plan.json
recipe=$(python -c 'import json; print(json.load(open("snugfit-examples/plan.json"))["best"]["recipe"])')

# 5. Train. On the machine with the GPU, leave out --dry-run and --from-scratch: training then begins with the
#    checkpoint's weights (`hf download` puts them into the local cache). The data are your .jsonl of texts.
printf '{"input_ids": [%d, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377]}\n' {1..64} > snugfit-examples/tokens.jsonl
snugfit train "$model" "${job[@]}" --gpu "$gpu" --recipe "$recipe" --dataset snugfit-examples/tokens.jsonl \
    --output-dir snugfit-examples/adapters --from-scratch --dry-run
