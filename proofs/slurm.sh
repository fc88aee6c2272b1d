#!/usr/bin/env bash
# make proof-slurm: a study on a SLURM of two nodes, while a job, a process and a node's daemon are killed.
#
# Both nodes are this machine: two slurmd with a fake GPU each.
# Run as root on a Debian with the packages slurm-wlm and munge, but without a SLURM of its own: the proof puts its
# configuration into /etc/slurm, where jobs look for it, and takes it away again with the daemons that it started.
# With the packages slurmdbd and mariadb-server this SLURM keeps accounts, as most clusters do; without them, or with
# ACCOUNTING=no, it keeps none. STUDY (default demo) names the study, WORK the folder to work in (default: a new temporary
# one). The same study is run without SLURM first, for its SHA256SUMS, unless EXPECTED names such a file.
set -euo pipefail

repository=$(cd "$(dirname "$0")/.." && pwd)
study=${STUDY:-demo}
work=${WORK:-$(mktemp -d)}
state=$work/slurm
nodes=(n1 n2)
host=$(hostname -s)
accounting=${ACCOUNTING:-yes}
{ command -v slurmdbd && command -v mariadbd && command -v mariadb-install-db; } >/dev/null || accounting=no
# Where SLURM's client of the database looks for its socket.
export MYSQL_UNIX_PORT=$state/database.socket
# Marks the processes of this proof's jobs, for SLURM hands on the environment.
export KVSTAGES_PROOF=$work
# Jobs run the workflow of the copy, never an installed one.
unset PYTHONPATH

fail() {
    echo "FAIL: $*" >&2
    exit 1
}
pass() { echo "PASS: $*"; }

stop() {
    status=$?
    trap - EXIT
    [ -z "${snakemake:-}" ] || kill "$snakemake" 2>/dev/null || true
    for name in "${nodes[@]/#/slurmd-}" slurmctld slurmdbd database munged; do
        [ ! -s "$state/$name.pid" ] || kill "$(cat "$state/$name.pid")" 2>/dev/null || true
    done
    # What is left of the jobs, which end with no daemon.
    unset KVSTAGES_PROOF
    { grep -lzsxF "KVSTAGES_PROOF=$work" /proc/[0-9]*/environ || true; } | cut -d/ -f3 | xargs -r kill -KILL 2>/dev/null || true
    for name in slurm.conf gres.conf slurmdbd.conf; do
        [ "$(readlink "/etc/slurm/$name")" != "$state/$name" ] || rm "/etc/slurm/$name"
    done
    [ -n "${WORK:-}" ] || [ $status != 0 ] || rm -rf "$work"
    exit $status
}

copy() {
    rm -rf "$1"
    mkdir -p "$1"
    (cd "$repository" && git ls-files --cached --others --exclude-standard -z | xargs -0 cp --parents -Pt "$1")
}

start_daemons() {
    rm -rf "$state"
    mkdir -p "$state/ctld" "${nodes[@]/#/$state/spool-}"
    chmod 755 "$work" "$state"
    head -c 1024 /dev/urandom >"$state/munge.key"
    chmod 400 "$state/munge.key"
    described=
    for node in "${nodes[@]}"; do
        mknod "$state/gpu-$node" c 1 3
        echo "NodeName=$node Name=gpu File=$state/gpu-$node" >>"$state/gres.conf"
        described+="NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((26820 + ${node#n})) CPUs=2 Boards=1"
        described+=" SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=32000 Gres=gpu:1 State=UNKNOWN"$'\n'
    done
    storage=AccountingStorageType=accounting_storage/none
    [ $accounting = no ] || storage="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=26819
AccountingStoragePass=$state/munge.socket
AccountingStorageTRES=gres/gpu"
    # The nodes claim more cores and memory than a small machine has, so that two jobs always fit beside each other.
    cat >"$state/slurm.conf" <<CONF
ClusterName=proof
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
CryptoType=crypto/munge
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/spool-%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd-%n.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd-%n.log
SlurmctldPort=26817
SlurmdTimeout=30
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
$storage
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
MinJobAge=3600
SchedulerParameters=sched_interval=1,bf_interval=2
GresTypes=gpu
${described}PartitionName=main Nodes=n[1-${#nodes[@]}] Default=YES MaxTime=600 State=UP
CONF
    mkdir -p /etc/slurm
    ln -s "$state/slurm.conf" "$state/gres.conf" /etc/slurm/
    munged --force --key-file="$state/munge.key" --socket="$state/munge.socket" --pid-file="$state/munged.pid" \
        --log-file="$state/munged.log" --seed-file="$state/munged.seed"
    [ $accounting = no ] || start_accounting
    slurmctld
    for node in "${nodes[@]}"; do slurmd -N "$node"; done
    wait_for "the nodes to be idle" 60 eval '[ "$(sinfo --noheader --Node --format %t | grep -c idle)" = ${#nodes[@]} ]'
}

# A database and its daemon, with one account that root may use.
start_accounting() {
    mariadb-install-db --user=root --datadir="$state/database" --auth-root-authentication-method=normal \
        >"$state/database.log" 2>&1
    mariadbd --no-defaults --user=root --datadir="$state/database" --socket="$MYSQL_UNIX_PORT" --skip-networking \
        --pid-file="$state/database.pid" >>"$state/database.log" 2>&1 &
    wait_for "the database" 60 eval 'mariadb-admin --no-defaults --socket="$MYSQL_UNIX_PORT" ping >/dev/null 2>&1'
    cat >"$state/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=26819
SlurmUser=root
PidFile=$state/slurmdbd.pid
LogFile=$state/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=proof
CONF
    chmod 600 "$state/slurmdbd.conf"
    ln -s "$state/slurmdbd.conf" /etc/slurm/
    slurmdbd
    wait_for "the accounts" 60 eval 'sacctmgr --immediate add cluster proof >/dev/null 2>&1'
    sacctmgr --immediate add account proof cluster=proof >/dev/null
    sacctmgr --immediate add user root account=proof cluster=proof >/dev/null
}

# wait_for WHAT SECONDS COMMAND...
wait_for() {
    local what=$1 deadline=$((SECONDS + $2))
    shift 2
    until "$@"; do
        [ $SECONDS -lt $deadline ] || fail "waited too long for $what"
        [ -z "${snakemake:-}" ] || alive || fail "snakemake ended while waiting for $what: see $work/cluster.log"
        sleep 0.5
    done
}

# Shards of the sweep, evaluations and seeds: what has a GPU.
on_gpu() { squeue --noheader --states RUNNING --Format "JobID:12,tres-per-job:40" | awk '/gpu/ {print $1}'; }
two_on_gpu() { [ "$(on_gpu | wc -l)" -ge 2 ]; }
# processes JOB stage: the process of the stage that a job runs, if it has begun.
# processes JOB all: every process of a job, first the slurmstepd that watch over them.
processes() {
    python3 - "$1" "$2" <<'PYTHON'
import os, sys
from pathlib import Path

marks = {f"SLURM_JOB_ID={sys.argv[1]}", f"KVSTAGES_PROOF={os.environ['KVSTAGES_PROOF']}"}
stage, all_of_job, watchers = [], [], set()
for folder in Path("/proc").glob("[0-9]*"):
    try:
        if not marks <= set((folder / "environ").read_text(errors="replace").split("\0")):
            continue
        all_of_job.append(folder.name)
        if "\0-m\0kvstages\0" in (folder / "cmdline").read_text(errors="replace"):
            stage.append(folder.name)
        parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        if (Path("/proc") / parent / "comm").read_text().strip() == "slurmstepd":
            watchers.add(parent)
    except OSError:  # ended meanwhile, or not ours
        continue
print(*(stage[:1] if sys.argv[2] == "stage" else [*watchers, *all_of_job]))
PYTHON
}
# Kills the process of the stage of one job on a GPU, and says which.
kill_stage() {
    for job in $(on_gpu); do
        if pid=$(processes "$job" stage) && [ -n "$pid" ] && kill -KILL "$pid" 2>/dev/null; then
            return
        fi
    done
    return 1
}
# Finds a node on which such a stage runs.
node_at_work() {
    for job in $(on_gpu); do
        node=$(squeue --noheader --jobs "$job" --format %N)
        [ -z "$node" ] || [ -z "$(processes "$job" stage)" ] || return 0
    done
    return 1
}
alive() { kill -0 "$snakemake" 2>/dev/null; }

command -v slurmctld >/dev/null && command -v munged >/dev/null || fail "the packages slurm-wlm and munge are needed"
[ "$(id -u)" = 0 ] || fail "root is needed to start the daemons"
python -c "import snakemake_executor_plugin_slurm" || fail "snakemake-executor-plugin-slurm is needed (make env has it)"
[ ! -e /etc/slurm/slurm.conf ] || fail "/etc/slurm/slurm.conf: this machine has a SLURM already"
echo "$(slurmd -V); accounting: $accounting; folder: $work"
trap stop EXIT
trap 'exit 130' INT TERM

expected=${EXPECTED:-}
if [ -z "$expected" ]; then
    copy "$work/local"
    (cd "$work/local" && snakemake --cores 1 --resources gpu=1 --config "studies=[$study]" >"$work/local.log" 2>&1) ||
        fail "without SLURM: see $work/local.log"
    expected=$work/local/results/$study/SHA256SUMS
    pass "the study $study without SLURM"
fi

start_daemons
copy "$work/cluster"
cd "$work/cluster"
# What workflow/profiles/README.md tells users to type, but for the seconds: they wait for a busy cluster, and there is none.
resources=("mem_mb=attempt * 8000" "runtime=attempt * 60" slurm_partition=main)
unasked=(--slurm-no-account)
[ $accounting = no ] || { resources+=(slurm_account=proof) && unasked=(); }
command=(snakemake --workflow-profile workflow/profiles/slurm --config "studies=[$study]"
    --default-resources "${resources[@]}" "${unasked[@]}"
    --slurm-init-seconds-before-status-checks 2 --seconds-between-status-checks 2)
begun=$SECONDS
"${command[@]}" >"$work/cluster.log" 2>&1 &
snakemake=$!

wait_for "two jobs with a GPU beside each other" 600 two_on_gpu
pass "jobs on GPUs run beside each other: $(squeue --noheader --states RUNNING --Format 'JobID:12,tres-per-job:20' | xargs)"

job=$(on_gpu | head -n 1)
scancel "$job"
pass "cancelled the running job $job"

wait_for "a job on a GPU whose stage can be killed" 600 kill_stage
pass "killed the process $pid of the running job $job"

# A node goes down: its daemon and what it runs die at once, and nothing can say so.
wait_for "a job on a GPU whose stage has begun" 600 node_at_work
lost=$(squeue --noheader --states RUNNING --nodelist "$node" --format %A | paste -sd ' ')
kill -KILL "$(cat "$state/slurmd-$node.pid")"
for lost_job in $lost; do
    for pid in $(processes "$lost_job" all); do
        kill -KILL "$pid" 2>/dev/null || true
    done
done
pass "killed slurmd of $node with the jobs on it: $lost"
wait_for "the node to be given up" 180 eval 'scontrol show node "$node" | grep State=.*DOWN >/dev/null'
sleep 10
alive || fail "snakemake ended while a node was down: see $work/cluster.log"
slurmd -N "$node"
wait_for "the node to be back" 120 eval 'sinfo --noheader --nodes "$node" --format %t | grep -Eq "^(idle|mix|alloc)$"'
pass "slurmd of $node is back"

# A rerun is what a user does after a job that failed once too often; `retries` of the profile should make it needless.
reruns=0
while ! wait "$snakemake"; do
    reruns=$((reruns + 1))
    [ $reruns -le 2 ] || fail "the workflow did not finish: see $work/cluster.log"
    echo "rerun $reruns"
    "${command[@]}" --rerun-incomplete >>"$work/cluster.log" 2>&1 &
    snakemake=$!
done
snakemake=
pass "finished after $((SECONDS - begun)) s and $reruns reruns; $(squeue --noheader --states all | wc -l) jobs, by state: $(
    squeue --noheader --states all --format %T | sort | uniq -c | xargs
)"
[ $accounting = no ] || pass "the accounts of proof, by state: $(
    sacct --allocations --noheader --accounts proof --duplicates --format State%20 | awk '{print $1}' | sort | uniq -c | xargs
)"

(cd "results/$study" && sha256sum --quiet --check SHA256SUMS) || fail "a result is not what it was"
diff "$expected" "results/$study/SHA256SUMS" || fail "the results are not those without SLURM: the lines above"
pass "$(wc -l <"results/$study/SHA256SUMS") files of the study $study, with SLURM and without: the same SHA256SUMS"
