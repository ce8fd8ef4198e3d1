#!/usr/bin/env bash
# Make the virtual environment that the Makefile's targets run in, or return at once when it is ready.
#
#   scripts/setup_venv.sh EXTRAS          for example: scripts/setup_venv.sh megatron,dev
#
# PYTHON       interpreter to use         (default: the first of python3, python3.12, ... that is 3.10 to 3.13)
# VENV         where to put it            (default: .venv)
# TORCH_INDEX  package index for torch    (default: pip's own; https://download.pytorch.org/whl/cpu has the CPU build)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=$1
venv=${VENV:-.venv}
ready=$venv/.ready-${extras//,/-}  # written last; says what it was made from
unfinished=$venv/.unfinished       # there while pip is at work

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# What a finished set-up was made from: a change in any of these, or a moved checkout, installs again.
fingerprint() { { pwd -P; cat pyproject.toml constraints.txt "$0"; } | cksum; }

# A venv's Python must still run, be a supported one, and be the one asked for, if one was.
python_fits() {
    local found
    found=$(version_of "$venv/bin/python") || return 1
    [[ $found == 3.1[0-3] && (-z ${PYTHON:-} || $found == "$(version_of "$PYTHON")") ]]
}
# Ready with more extras is ready, too: hence the star.
is_ready() { python_fits && [[ ! -e $unfinished ]] && grep -qsxF "$(fingerprint)" "$ready"*; }

# For an installation over it, a venv needs a pip that works, still lies where it was made, and never broke off.
can_be_kept() {
    python_fits && [[ ! -e $unfinished && "$("$venv/bin/pip" --version 2>/dev/null)" == *" $(cd "$venv" && pwd)/"* ]]
}

# Sets $python. A pyenv shim may exist and yet not run, so every candidate is asked for its version.
choose_python() {
    local candidates=(python3 python3.12 python3.11 python3.13 python3.10) candidate version unfit="" bare=""
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if ! version=$(version_of "$candidate"); then continue; fi
        if [[ $version != 3.1[0-3] ]]; then unfit+=" $candidate is $version;"; continue; fi
        if can_make_venv "$candidate"; then python=$candidate; return; fi
        bare=$version
    done
    if [[ -n $bare ]]; then
        die "Python $bare is here, but without venv and ensurepip. Install them, for example:" \
            "apt-get install python3-venv (or python$bare-venv), and run this again."
    fi
    die "no Python from 3.10 to 3.13 found:${unfit:-" none of ${candidates[*]} runs;"}" \
        "there is no megatron-core wheel for other versions." \
        "Install one of them, or name it: make PYTHON=/path/to/python3.12 ..."
}

create() {
    choose_python
    say "creating $venv with Python $(version_of "$python")"
    rm -rf "$venv"
    "$python" -m venv "$venv" || { rm -rf "$venv"; die "'$python -m venv' failed: apt-get install python3-venv"; }
}

install() {
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
    # In the environment, so that the build back-end is pinned as well; the second name is the one newer pips want.
    export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
    touch "$unfinished"
    say "installing the pinned packages (the first time takes minutes: torch is large)"
    if [[ -n ${TORCH_INDEX:-} ]]; then "${pip[@]}" --no-deps --index-url "$TORCH_INDEX" torch || return; fi
    if [[ ,$extras, == *,megatron,* ]]; then install_megatron "${pip[@]}" || return; fi
    "${pip[@]}" --editable ".[$extras]" || return
    if [[ ,$extras, == *,dev,* ]]; then install_deepspeed "${pip[@]}"; fi
    # pip compiles one module after the other: 14,000 are quicker on all cores. Those that are for another Python are left out, as by pip.
    "$venv/bin/python" -W ignore -m compileall -qq -j 0 "$venv/lib" || true
    rm "$unfinished"
}

# Ahead of the rest, which then finds it there: these packages ask for Python 3.12, but run on 3.11 as well.
install_megatron() {
    "$@" --no-deps --ignore-requires-python megatron-core 'emerging_optimizers; python_version >= "3.11"' absl-py
}

# Only tests need it. It is built from source, against the torch that is there now: without isolation, and without kernels.
install_deepspeed() {
    DS_BUILD_OPS=0 "$@" --no-build-isolation deepspeed ||
        say "DeepSpeed could not be installed (see above): the tests that run it will be skipped"
}

if is_ready; then exit; fi
exec 9>.setup.lock
if command -v flock >/dev/null; then flock 9; fi # a second make waits here, then finds everything done
if is_ready; then exit; fi
if ! can_be_kept; then create; fi
install || die "pip could not install the packages (see above). Once that is mended, run this again: it starts afresh."
fingerprint >"$ready"
say "ready"
