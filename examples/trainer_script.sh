#!/usr/bin/env bash
# You have a script with a Trainer (here trainer_script.py) and a card with 12 GB. The script is read, not run.
#
#     source .venv/bin/activate
#     examples/trainer_script.sh
#
# SCRIPT and GPU may be others: SCRIPT=train.py GPU=l4 examples/trainer_script.sh (and KEEP=sdpa fixes a slot)
set -u
here=$(dirname "$0")
script=${SCRIPT:-$here/trainer_script.py}
gpu=${GPU:-rtx 3060}

# 1. Does it fit as it stands? What became of each argument is printed too. Exit code 3: it does not fit.
snugfit predict --arguments "$script" --gpu "$gpu"
echo "exit code $?"

# 2. Is anything in it wrong, renamed or without effect? Exit code 3: something is. The file is not changed.
snugfit check "$script"
echo "exit code $?"

# 3. The fastest way to make it fit: the same global batch, precision and optimizer as in the script.
snugfit plan --arguments "$script" --gpu "$gpu" --details ${KEEP:+--keep "$KEEP"}

# 4. To train as planned: two lines more in the script, as in fit_a_trainer.py, which runs on any machine.
python "$here/fit_a_trainer.py"
