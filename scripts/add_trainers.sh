#!/usr/bin/env bash
# Put trainers' own packages in a folder, each release alone, for the tests that have them load what we write.
#
#   scripts/add_trainers.sh FOLDER       pinned releases from the package registry, pinned commits from GitHub
#
# VENV  the virtual environment whose pip is used, made by scripts/setup_venv.sh   (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
target=$1
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python)
releases=(
    verl==0.9.1 verl==0.8.0 verl==0.7.0 mbridge==0.15.1 openrlhf==0.11.2 trl==1.16.0
    nemo_automodel==0.4.0 torchtitan==0.2.2 torchtitan==0.3.0 torch_checkpointing==0.1.1 lightning==2.6.6 areal==1.0.4 skyrl==0.3.0
    ms_swift==4.6.0 mcore_bridge==1.6.5 schedulefree==1.4.1
)
repositories=( # folder, repository, commit, what of it is a package
    "RLinf-a3816b5 RLinf/RLinf a3816b596478dcd8a5c69a6ec1468c9519f77b5b rlinf"
    "NeMo-RL-7ea279a NVIDIA-NeMo/RL 7ea279abfbeb698b092856d0dab61e7cf39bc909 nemo_rl"
    "Megatron-Bridge-067f987 NVIDIA-NeMo/Megatron-Bridge 067f987df03b8355b03192d88d70f1709fedf51a src"
    "prime-rl-559b447 PrimeIntellect-ai/prime-rl 559b44772e471d1538537b8805cc77f3824a5e64 src"
    "slime-624b824 THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515 slime"
    "miles-31f1ca9 radixark/miles 31f1ca961a94cb860cec3b2dea34ec332bfa8f76 miles"
    "open-instruct-e6c3044 allenai/open-instruct e6c3044aa6201c8bfa4573c1b03142af599e730d open_instruct"
    "ROLL-8eb27cc2 alibaba/ROLL 8eb27cc2dc34c4d1310b169d9b86d339004d811a ."
)

say() { printf 'setup: %s\n' "$*" >&2; }

# A folder is there only when it is whole; a release's own tests would be taken for ours.
install() { # folder, arguments of pip
    local folder=$target/$1
    if [[ -d $folder ]]; then return; fi
    say "adding $1"
    rm -rf "$folder.unfinished"
    "${pip[@]}" --target "$folder.unfinished" "${@:2}"
    rm -rf "$folder.unfinished/tests"
    mv "$folder.unfinished" "$folder"
}

fetch() { # folder, repository, commit, package
    local folder=$target/$1 unfinished=$target/$1.unfinished
    if [[ -d $folder ]]; then return; fi
    say "fetching $1"
    rm -rf "$unfinished"
    git init -q "$unfinished"
    timeout 300 git -C "$unfinished" fetch -q --depth 1 --filter=blob:none "https://github.com/$2" "$3" &&
        git -C "$unfinished" checkout -q FETCH_HEAD -- "$4" && mv "$unfinished" "$folder" ||
        { rm -rf "$unfinished"; say "$2 cannot be fetched: its tests are skipped"; }
}

mkdir -p "$target"
exec 9>"$target/.lock"
if command -v flock >/dev/null; then flock 9; fi # pip is at work here once at a time
needs=needs-$(cksum <tests/trainers/needs.txt | cut -d ' ' -f 1) # other needs are installed anew
install "$needs" -r tests/trainers/needs.txt
ln -sfn "$needs" "$target/needs"
ln -sfn "$needs" "$target/site-packages" # dill pickles modules that lie elsewhere by their content
for release in "${releases[@]}"; do install "${release/==/-}" "$release"; done
for repository in "${repositories[@]}"; do read -r folder name commit package <<<"$repository" && fetch "$folder" "$name" "$commit" "$package"; done
