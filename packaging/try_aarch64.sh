#!/usr/bin/env bash
# Tries the aarch64 wheel under an emulator, on Debian or Ubuntu with qemu-user-static:
#
#   packaging/try_aarch64.sh dist/*aarch64.whl
#
# Python for aarch64 comes from Debian's packages and the dependencies from PyPI, into build/aarch64; nothing
# is installed. The example is converted and verified there, with the kernels, and converted here; the
# outputs must have the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(realpath "$1")
work=$PWD/build/aarch64
rm -rf "$work"
mkdir -p "$work"/{debs,root,packages}

dpkg --print-foreign-architectures | grep -qx arm64 || { dpkg --add-architecture arm64; apt-get -qq update; }
packages=(libc6 libgcc-s1 libstdc++6 libexpat1 zlib1g libssl3 libffi8 libuuid1 libbz2-1.0 liblzma5 libsqlite3-0
  libpython3.11-minimal libpython3.11-stdlib python3.11-minimal)
(cd "$work/debs" && apt-get -qq download "${packages[@]/%/:arm64}")
for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
python -m pip download -q --disable-pip-version-check --only-binary=:all: --python-version 3.11 \
  --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
  --platform manylinux_2_27_aarch64 -c constraints.txt -d "$work/packages" "$wheel"
mkdir "$work/site"
for one in "$work"/packages/*.whl; do python -m zipfile -e "$one" "$work/site"; done

export PYTHONPATH="$work/site" PYTHONDONTWRITEBYTECODE=1
python3=(qemu-aarch64-static -L "$work/root" "$work/root/usr/bin/python3.11")
"${python3[@]}" -m ktconv --version --json
for method in int4 int8; do
  "${python3[@]}" -m ktconv quantize-cpu docs/example/tiny-moe "$work/$method" --method $method --numa 2 --progress none
  "${python3[@]}" -m ktconv verify "$work/$method" --source docs/example/tiny-moe --progress none
  env -u PYTHONPATH .venv/bin/ktconv quantize-cpu docs/example/tiny-moe "$work/$method-here" --method $method --numa 2 \
    --progress none
  for file in "$work/$method"/*.safetensors; do cmp "$file" "$work/$method-here/${file##*/}"; done
done
echo "the same bytes on aarch64"
