#!/usr/bin/env bash
# The whole of the Action: its inputs as INPUT_…, its outputs and summary into the files that GitHub names, where it names any.
# Exit codes are those of mcore-rlhf resume-check: 0 exact, 1 not, 2 the command could not be checked.
set -uo pipefail

command=${INPUT_COMMAND:-}
folder=${INPUT_FOLDER:-resume-check}
result=$folder/result.json
summary=${GITHUB_STEP_SUMMARY:-/dev/null}

if [[ -z ${command//[[:space:]]/} ]]; then
  echo "error: INPUT_COMMAND is empty: give the training command, with {dir} and {steps}" >&2
  exit 2
fi
# The command's words as a shell would part them. No shell runs them: what they say of $(…) or ; is text.
if ! words=$(python3 -c 'import base64, shlex, sys
for word in shlex.split(sys.argv[1]): print(base64.b64encode(word.encode()).decode() or "-")' "$command" 2>/dev/null); then
  echo "error: INPUT_COMMAND: a quote is not closed: $command" >&2
  exit 2
fi
arguments=()
while IFS= read -r word; do
  [[ $word == - ]] && arguments+=("") || arguments+=("$(base64 -d <<<"$word")")
done <<<"$words"
options=(--steps "${INPUT_STEPS:-3}" --more "${INPUT_MORE:-2}" --profile "${INPUT_PROFILE:-exact}")
options+=(--kill-after "${INPUT_KILL_AFTER:-step-commit}" --timeout "${INPUT_TIMEOUT:-900}")
while IFS= read -r pattern; do
  [[ -z $pattern ]] || options+=(--ignore "$pattern")
done <<<"${INPUT_IGNORE:-}"

said=$(mktemp)
trap 'rm -f "$said"' EXIT
mcore-rlhf resume-check "${options[@]}" --dir "$folder" --json -- "${arguments[@]}" >"$said"
code=$?
[[ -d $folder ]] && cp "$said" "$result"

# What it came to, in a few lines: for the log, and for the page of the run.
python3 - "$said" "$folder" >"$said.text" <<'PYTHON'
import json
import sys

try:
    with open(sys.argv[1], encoding="utf-8") as file:
        found = json.load(file)
except ValueError:
    found = {}
first, worst = found.get("first_difference"), found.get("worst")
profile = (found.get("profile") or {}).get("name", "")
print(found.get("verdict", "error"))
if "verdict" in found:
    print(f"resume-check: {found['verdict']}, profile {profile}, steps {found['steps']} + {found['more']}")
else:
    print(f"resume-check: could not be checked: {(found.get('error') or {}).get('message', 'see the log above')}")
if first:
    print(f"first difference: {first['where']}: {first['key']}: {first['first']} and {first['second']} {first['detail']}".rstrip())
if worst:
    print(f"worst within the profile: {worst['where']}: {worst['key']}: off by {worst['off']:.3g}, allowed {worst['allowed']:.3g}")
for note in found.get("notes", ()):
    print(note)
PYTHON
verdict=$(head -n 1 "$said.text")
tail -n +2 "$said.text" | tee -a "$summary"
rm -f "$said.text"
if [[ -n ${GITHUB_OUTPUT:-} ]]; then
  printf 'verdict=%s\nfolder=%s\n' "$verdict" "$folder" >>"$GITHUB_OUTPUT"
fi
exit "$code"
