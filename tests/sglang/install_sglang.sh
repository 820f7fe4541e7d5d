#!/usr/bin/env bash
# Installs SGLang for a CPU, our platform for it, and this checkout into the environment of $PYTHON.
set -euo pipefail
cd "$(dirname "$0")"
pip() { "$PYTHON" -m pip install -qq --disable-pip-version-check "$@"; }
# SGLang's own requirements are a CUDA stack; what it needs here is listed instead.
pip -r requirements.txt
pip --no-deps sglang==0.5.23 triton torchvision==0.28.0
pip --no-deps --no-build-isolation ./cpu_platform
pip --no-deps --no-build-isolation -e ../..
site=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo 'import hicache_sglang_cpu.startup' > "$site/hicache_sglang_cpu.pth"
rm -rf cpu_platform/build cpu_platform/*.egg-info
