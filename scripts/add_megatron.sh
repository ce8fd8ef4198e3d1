#!/usr/bin/env bash
# Put other releases of megatron-core beside the one in the virtual environment, which scripts/setup_venv.sh has made.
#
#   scripts/add_megatron.sh 0.16.1 0.17.1     each lies in VENV/megatron-VERSION, alone: it shares torch and all else
#   PYTHONPATH=.venv/megatron-0.16.1 ...      and is the one that runs where it comes first
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python)

exec 9>.setup.lock
if command -v flock >/dev/null; then flock 9; fi # pip is at work here once at a time
for version in "$@"; do
    folder=$venv/megatron-$version # there only when it is whole
    if [[ -d $folder ]]; then continue; fi
    if [[ $version == 0.1[7-9].* && $("$venv/bin/python" -V) == "Python 3.10."* ]]; then continue; fi # no wheel
    printf 'setup: adding megatron-core %s\n' "$version" >&2
    rm -rf "$folder.unfinished"
    "${pip[@]}" --target "$folder.unfinished" "megatron-core==$version"
    mv "$folder.unfinished" "$folder"
done
