#!/bin/sh
# sh envs/install.sh PYTHON [cpu|cuda]: install what envs/lock pins into the environment of that Python, and nothing else.
# Used by the Makefile, Containerfile and kvstages.def; where packages come from is pip's own configuration.
# Which build of torch: the one that is named; without a name the CPU's where the index has it, else the index's own.
set -eu

python=$1
variant=${2:-any}
lock=$(dirname "$0")/lock
# Into this environment, whatever pip.conf says: user = true would be refused there.
export PIP_USER=0

install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
        --only-binary :all: --no-binary connection-pool --no-build-isolation --use-pep517 --requirement "$lock/$1.txt"
}

# connection-pool is published as source only (pure Python); what builds it comes first, from the lock as well.
install build
install common

case $variant in
    cpu | cuda) install "$variant" ;;
    any) install cpu 2>/dev/null || install cuda ;;
    *)
        echo "envs/install.sh: expected cpu, cuda or nothing for the build of torch, found: $variant" >&2
        exit 2
        ;;
esac

"$python" -m pip check
