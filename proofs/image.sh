#!/usr/bin/env bash
# make proof-image: the whole study inside the image, network off, and the same study outside: the same SHA256SUMS?
#
# Takes the image that `make image` made last. Needs podman; takes the apptainer on the PATH, and where there is none the
# stand-in proofs/apptainer-by-podman. STUDY (default demo) names the study, WORK the folder to work in (default: a
# new temporary one), APPTAINER_ARGS what else Apptainer is to be told (default: no network; a GPU wants --nv besides).
set -euo pipefail

repository=$(cd "$(dirname "$0")/.." && pwd)
study=${STUDY:-demo}
arguments=${APPTAINER_ARGS:---net --network none}
work=${WORK:-$(mktemp -d)}
tag=$(cat "$repository/build/image")

fail() {
    echo "FAIL: $*" >&2
    exit 1
}
pass() { echo "PASS: $*"; }

if ! command -v apptainer >/dev/null; then
    mkdir -p "$work/bin"
    ln -sf "$repository/proofs/apptainer-by-podman" "$work/bin/apptainer"
    export PATH=$work/bin:$PATH
    echo "apptainer: none here; its stand-in by podman"
else
    echo "apptainer: $(apptainer --version)"
fi
echo "image: $tag; folder: $work"

# Both runs start from a copy of the repository as it is here, committed or not, without anything that was made before.
copy() {
    mkdir -p "$1"
    (cd "$repository" && git ls-files --cached --others --exclude-standard -z | xargs -0 cp --parents -Pt "$1")
}
rm -rf "$work/outside" "$work/inside"
copy "$work/outside"
copy "$work/inside"

# No compiler, no network, any user, a root file system that cannot be written.
run=(podman run --rm --network none --read-only --tmpfs /tmp --cap-drop all --user 65534:65534
    --volume "$work/inside:/repository:ro" --workdir /repository "$tag")
for tool in cc gcc g++ clang c++ ld; do
    ! "${run[@]}" sh -c "command -v $tool" || fail "the image holds a compiler: $tool"
done
pass "no compiler in the image"
"${run[@]}" python -m kvstages --version || fail "the stages do not start as user 65534"
"${run[@]}" python -m kvstages --help >/dev/null || fail "a stage does not start as user 65534"
"${run[@]}" python -c "import torch, matplotlib.pyplot, pandas, safetensors" || fail "imports as user 65534"
pass "works as a user without a name, without a home, on a root file system that is read-only"

rm -f "$work/kvstages.sif"
podman save --quiet --format docker-archive --output "$work/image.tar" "$tag"
apptainer build "$work/kvstages.sif" "docker-archive:$work/image.tar"
rm -f "$work/image.tar"
# shellcheck disable=SC2086  # the arguments are words
interfaces=$(cd "$work/inside" && apptainer exec $arguments "$work/kvstages.sif" ls /sys/class/net)
[ "$interfaces" = lo ] || fail "the network is not off inside: $interfaces"
pass "no network inside but the loopback"

options=(--cores 1 --config device=cpu "studies=[$study]" "container=$work/kvstages.sif")
started=$SECONDS
(cd "$work/outside" && snakemake "${options[@]}" >"$work/outside.log" 2>&1) || fail "outside: see $work/outside.log"
pass "outside: $(find "$work/outside/results" -type f | wc -l) files in $((SECONDS - started)) s"
started=$SECONDS
(cd "$work/inside" && snakemake "${options[@]}" --software-deployment-method apptainer \
    --apptainer-args="$arguments" >"$work/inside.log" 2>&1) || fail "inside: see $work/inside.log"
pass "inside: $(find "$work/inside/results" -type f | wc -l) files in $((SECONDS - started)) s"

# Every job but `all`, which has no command, must have entered the image.
entered=$(grep -c '^Activating .* image' "$work/inside.log" || true)
jobs=$(grep -c '^Finished jobid' "$work/inside.log" || true)
[ "$entered" -gt 0 ] && [ $((jobs - entered)) -le 1 ] || fail "of $jobs jobs inside, $entered entered the image"
pass "$entered jobs entered the image"

for place in outside inside; do
    (cd "$work/$place/results/$study" && sha256sum --quiet --check SHA256SUMS) || fail "$place: a result is not what it was"
done
diff "$work/outside/results/$study/SHA256SUMS" "$work/inside/results/$study/SHA256SUMS" ||
    fail "the study inside the image is not the study outside: the lines above"
pass "$(wc -l <"$work/inside/results/$study/SHA256SUMS") files of the study $study, inside and outside: the same SHA256SUMS"
sha256sum "$work"/{outside,inside}/results/"$study"/SHA256SUMS
[ -n "${WORK:-}" ] || rm -rf "$work"
