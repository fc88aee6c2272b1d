#!/usr/bin/env bash
# make proof-slurm: a study on a SLURM of one node, while a job, a process and the node's daemon are killed.
#
# Run as root on a Debian with the packages slurm-wlm and munge; starts daemons of its own beside whatever is there (other
# ports, sockets and folders) and ends them. The GPUs are fake devices. STUDY (default embedded) names the study, WORK the
# folder to work in (default: a new temporary one). The same study is run without SLURM first, for its SHA256SUMS, unless
# EXPECTED names such a file.
set -euo pipefail

repository=$(cd "$(dirname "$0")/.." && pwd)
study=${STUDY:-embedded}
work=${WORK:-$(mktemp -d)}
state=$work/slurm
gpus=2
host=$(hostname -s)
export SLURM_CONF=$state/slurm.conf
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
    for name in slurmd slurmctld munged; do
        [ ! -s "$state/$name.pid" ] || kill "$(cat "$state/$name.pid")" 2>/dev/null || true
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
    mkdir -p "$state/spool" "$state/ctld"
    chmod 755 "$work" "$state"
    head -c 1024 /dev/urandom >"$state/munge.key"
    chmod 400 "$state/munge.key"
    for ((i = 0; i < gpus; i++)); do
        mknod "$state/gpu$i" c 1 3
    done
    echo "NodeName=$host Name=gpu File=$state/gpu[0-$((gpus - 1))]" >"$state/gres.conf"
    # The node claims more cores and memory than a small machine has, so that two jobs always fit beside each other.
    cat >"$state/slurm.conf" <<CONF
ClusterName=proof
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
CryptoType=crypto/munge
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/spool
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
SlurmctldPort=26817
SlurmdPort=26818
SlurmdTimeout=30
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
MinJobAge=3600
SchedulerParameters=sched_interval=1,bf_interval=2
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:$gpus State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=600 State=UP
CONF
    munged --force --key-file="$state/munge.key" --socket="$state/munge.socket" --pid-file="$state/munged.pid" \
        --log-file="$state/munged.log" --seed-file="$state/munged.seed"
    slurmctld
    slurmd
    wait_for "the node to be idle" 60 eval 'sinfo --noheader --format %t | grep -q idle'
}

# wait_for WHAT SECONDS COMMAND...
wait_for() {
    local what=$1 deadline=$((SECONDS + $2))
    shift 2
    until "$@"; do
        [ $SECONDS -lt $deadline ] || fail "waited too long for $what"
        sleep 0.5
    done
}

running() { squeue --noheader --states RUNNING --format "%A %k"; }
two_run() { [ "$(running | wc -l)" -ge 2 ]; }
# processes_of JOB: ids of the processes that this SLURM started for a job.
processes_of() {
    local folder
    for folder in /proc/[0-9]*; do
        if tr '\0' '\n' <"$folder/environ" 2>/dev/null | grep -cx -e "SLURM_JOB_ID=$1" -e "SLURM_CONF=$SLURM_CONF" |
            grep -qx 2; then
            basename "$folder"
        fi
    done
}
# stage_of JOB: id of the process of the stage that a job runs, if it has begun.
stage_of() {
    local pid
    for pid in $(processes_of "$1"); do
        if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "^python -m kvstages"; then
            echo "$pid"
            return
        fi
    done
}
# kill_with_daemons JOB: its processes, and the slurmstepd that are their parents.
kill_with_daemons() {
    local pid parent pids
    pids=$(processes_of "$1")
    for pid in $pids; do
        parent=$(awk '/^PPid:/ {print $2}' "/proc/$pid/status" 2>/dev/null || true)
        if [ -n "$parent" ] && [ "$(cat "/proc/$parent/comm" 2>/dev/null)" = slurmstepd ]; then
            kill -KILL "$parent" 2>/dev/null || true
        fi
    done
    for pid in $pids; do
        kill -KILL "$pid" 2>/dev/null || true
    done
}
job_with_stage() {
    local job
    for job in $(running | cut -d ' ' -f 1); do
        if [ -n "$(stage_of "$job")" ]; then
            echo "$job"
            return
        fi
    done
    return 1
}
alive() { kill -0 "$snakemake" 2>/dev/null; }

command -v slurmctld >/dev/null && command -v munged >/dev/null || fail "the packages slurm-wlm and munge are needed"
[ "$(id -u)" = 0 ] || fail "root is needed to start the daemons"
python -c "import snakemake_executor_plugin_slurm" || fail "snakemake-executor-plugin-slurm is needed (make env has it)"
echo "$(slurmd -V); folder: $work"
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
# A cluster with accounting needs none of these options; the partition and account are its own.
command=(snakemake --workflow-profile workflow/profiles/slurm --config "studies=[$study]" --slurm-no-account
    --default-resources "mem_mb=attempt * 8000" "runtime=attempt * 60" slurm_partition=main
    --slurm-status-command squeue --slurm-init-seconds-before-status-checks 2 --seconds-between-status-checks 2)
begun=$SECONDS
"${command[@]}" >"$work/cluster.log" 2>&1 &
snakemake=$!

wait_for "two jobs beside each other" 300 two_run
pass "jobs run beside each other: $(squeue --noheader --states RUNNING --format '%A (%b)' | paste -sd ' ')"

job=$(running | head -n 1 | cut -d ' ' -f 1)
scancel "$job"
pass "cancelled the running job $job"

wait_for "a job whose stage has begun" 300 eval 'job_with_stage >/dev/null'
job=$(job_with_stage)
kill -KILL "$(stage_of "$job")"
pass "killed the process of the running job $job"

# The node goes down: its daemon and what it runs die at once, and nothing can say so.
wait_for "a job whose stage has begun" 300 eval 'job_with_stage >/dev/null'
job=$(job_with_stage)
lost=$(running | cut -d ' ' -f 1 | paste -sd ' ')
kill -KILL "$(cat "$state/slurmd.pid")"
for lost_job in $lost; do
    kill_with_daemons "$lost_job"
done
pass "killed slurmd with the jobs on it: $lost"
sleep 10
alive || fail "snakemake ended while the node was down: see $work/cluster.log"
slurmd
wait_for "the node to be back" 120 eval 'sinfo --noheader --format %t | grep -Eq "idle|mix|alloc"'
pass "slurmd is back"

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

(cd "results/$study" && sha256sum --quiet --check SHA256SUMS) || fail "a result is not what it was"
diff "$expected" "results/$study/SHA256SUMS" || fail "the results are not those without SLURM: the lines above"
pass "$(wc -l <"results/$study/SHA256SUMS") files of the study $study, with SLURM and without: the same SHA256SUMS"
