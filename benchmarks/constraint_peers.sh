#!/bin/sh
# An environment with the engines that benchmarks/constraints.py compares with: constraint_peers.sh FOLDER
set -eu
python3 -m venv "$1"
"$1/bin/pip" install --quiet outlines-core==0.2.14 llguidance==1.9.1 xgrammar==0.2.9 tokenizers numpy torch
