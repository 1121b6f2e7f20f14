#!/usr/bin/env bash
# Build the CPU image without a container engine's daemon, and compare a prediction in it with one outside.
#
#     container/image.sh PYTHON
#
# PYTHON is that of an environment with snugfit and pip. It has the minor version of Debian's Python (3.11 on
# Debian 12), because pip collects the packages outside and the image installs them without a network.
# The base is made by debootstrap, so no registry is needed. Run it as root, with buildah and debootstrap.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?usage: container/image.sh PYTHON}
suite=${SUITE:-bookworm}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
folder=build/image
image=localhost/snugfit:cpu

for tool in buildah debootstrap; do
  command -v "$tool" > /dev/null || { echo "make image needs $tool: apt-get install buildah debootstrap" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "make image runs as root, because debootstrap does: sudo make image" >&2; exit 1; }
mkdir -p "$folder/wheels"
store=(buildah --root "$PWD/$folder/store" --runroot "$PWD/$folder/run")
build=("${store[@]}" build --isolation chroot --pull-never --layers)

if [ ! -e "$folder/debian.tar" ]; then
  rm -rf "$folder/debian"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$suite" "$folder/debian" > "$folder/debootstrap.log"
  tar -C "$folder/debian" -cf "$folder/debian.part" .
  mv "$folder/debian.part" "$folder/debian.tar"
  rm -rf "$folder/debian"
fi
printf 'FROM scratch\nADD debian.tar /\nCMD ["bash"]\n' |
  "${build[@]}" --quiet --tag localhost/debian:"$suite" --file - "$folder" > /dev/null

"$python" container/dependencies.py pyproject.toml train peft > "$folder/dependencies.txt"
"$python" -m pip download -qq --retries 0 -d "$folder/wheels" -c constraints.txt --extra-index-url "$torch_index" \
  torch==2.13.0+cpu hatchling -r "$folder/dependencies.txt"
offline="--no-index --find-links /wheels"
"${build[@]}" --tag "$image" --file container/cpu.Dockerfile --volume "$PWD/$folder/wheels:/wheels:ro" \
  --build-arg BASE=localhost/debian:"$suite" --build-arg TORCH_FROM="$offline" \
  --build-arg PACKAGES_FROM="$offline" .

question=(predict bert-large-uncased --gpu "rtx 4090" --recipe "bf16 + every_layer" --json)
container=$("${store[@]}" from --pull-never "$image")
trap '"${store[@]}" rm "$container" > /dev/null' EXIT
"${store[@]}" run --isolation chroot "$container" -- snugfit "${question[@]}" > "$folder/inside.json"
"$python" -m snugfit "${question[@]}" > "$folder/outside.json"
# `versions` also lists optional packages, which the image does not have.
"$python" - "$folder/inside.json" "$folder/outside.json" <<'COMPARE'
import json, sys

inside, outside = (json.load(open(path, encoding="utf-8")) for path in sys.argv[1:])
del inside["versions"], outside["versions"]
if inside != outside:
    sys.exit(f"The prediction in the image differs in {[key for key in inside if inside[key] != outside.get(key)]}.")
print(f"inside and outside the image: {inside['footprint']['reserved_bytes']:,} reserved bytes, all else equal too")
COMPARE
"${store[@]}" images "$image"
