#!/usr/bin/env bash
# You rent GPUs by the hour. On which is a LoRA run over 50,000 samples cheapest, and on which is it fastest?
#
#     source .venv/bin/activate
#     examples/rent_a_gpu.sh
#
# MODEL, GPUS and KEEP may be others: GPUS="t4 l4 a10g" examples/rent_a_gpu.sh
set -u
here=$(dirname "$0")
model=${MODEL:-Qwen/Qwen3-8B}
keep=${KEEP:-lora}
read -r -a gpus <<< "${GPUS:-l4 rtx4090 h100-sxm}"
job=(--task causal-lm --batch-size 16 --sequence-length 2048)
mkdir -p snugfit-examples

# 1. What is in the table, and what one of them can do.
snugfit gpus "${gpus[0]}"

# 2. One recipe on these GPUs: where does it fit, and what does the run cost? Prices are yours: prices.yaml.
snugfit gpus "${gpus[@]}" --for "$model" "${job[@]}" --recipe "lora + bf16 + every_layer + micro_batches(16)" \
    --prices "$here/prices.yaml" --samples 50000 --objective cost

# 3. The best recipe of each GPU. Without names, every GPU of the table is asked.
snugfit gpus "${gpus[@]}" --for "$model" "${job[@]}" --keep "$keep" \
    --prices "$here/prices.yaml" --samples 50000 --objective cost --html snugfit-examples/gpus.html

# 4. Take the answer along as a script for the rented machine, which needs torch and transformers only.
snugfit export "lora + bf16 + every_layer + micro_batches(16)" "$model" "${job[@]}" --to hf \
    --output snugfit-examples/rented --force
