#!/usr/bin/env bash
# `ddprun --hosts` over real sshds, in two network namespaces (root; apt-get install openssh-server).
#
#     scripts/ssh_hosts.sh [DDPRUN]
#
# Runs, a failing rank, signals, the death of ddprun and of a connection: after each, no worker may be left. Prints one line each.
set -euo pipefail
ddprun=$(realpath "${1:-target/debug/ddprun}")
folder=$(mktemp -d)
a=ddp-ssh-a-$$ b=ddp-ssh-b-$$
cleanup() {
    for space in $a $b; do
        # Only the processes of these namespaces.
        ip netns pids $space 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del $space 2>/dev/null || true
    done
    rm -rf "$folder"
}
trap cleanup EXIT
ip netns add $a
ip netns add $b
ip link add va$$ netns $a type veth peer name vb$$ netns $b
ip -n $a addr add 10.77.0.1/24 dev va$$
ip -n $b addr add 10.77.0.2/24 dev vb$$
for end in "$a va$$" "$b vb$$"; do
    read -r space link <<<"$end"
    ip -n "$space" link set lo up
    ip -n "$space" link set "$link" up
done
cd "$folder"
ssh-keygen -q -t ed25519 -N '' -f key
ssh-keygen -q -t ed25519 -N '' -f host_key
cp key.pub authorized
mkdir -p /run/sshd
cat >sshd.conf <<END
HostKey $folder/host_key
AuthorizedKeysFile $folder/authorized
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
END
ip netns exec $a "$(command -v sshd || echo /usr/sbin/sshd)" -f sshd.conf -o ListenAddress=10.77.0.1
ip netns exec $b "$(command -v sshd || echo /usr/sbin/sshd)" -f sshd.conf -o ListenAddress=10.77.0.2
options="-o BatchMode=yes -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
export CANDLE_DDP_RSH="ssh -T $options -i $folder/key"
two=(--hosts 10.77.0.1,10.77.0.2 --nproc-per-node 2)

launch() { exec ip netns exec $a "$ddprun" "${two[@]}" "$@"; }
fail() {
    echo "FAILED: $1"
    cat output
    exit 1
}
# run CODE NAME COMMAND...: the run must end with CODE.
run() {
    local code=$1 name=$2 got=0
    shift 2
    (launch "$@") >output 2>&1 || got=$?
    [ $got = "$code" ] || fail "$name: exit code $got"
    echo "$name: exit code $got"
}
# Starts workers that wait, and sets `launcher`.
start() {
    rm -f pid?
    (launch sh -c 'echo $$ >pid$RANK; exec sleep 1000') >output 2>&1 &
    launcher=$!
    until [ -s pid0 ] && [ -s pid1 ] && [ -s pid2 ] && [ -s pid3 ]; do sleep 0.05; done
}
# gone NAME: the workers must end within ten seconds.
gone() {
    local since
    since=$(date +%s%N)
    for pid in $(cat pid?); do
        while kill -0 "$pid" 2>/dev/null; do
            [ $((($(date +%s%N) - since) / 1000000)) -lt 10000 ] || fail "$1: worker $pid is left"
            sleep 0.01
        done
    done
    echo "$1: no worker is left after $((($(date +%s%N) - since) / 1000000)) ms"
}

run 0 "a run" sh -c 'echo rank $RANK'
[ "$(grep -c '^rank [0-3]$' output)" = 4 ] || fail "a run: not all ranks are there"
run 42 "a rank that fails" sh -c '[ $RANK != 3 ] || exit 42; exec sleep 1000'
start
for process in /proc/[0-9]*; do
    ! tr '\0' ' ' 2>/dev/null <"$process/cmdline" | grep -qF "$(tr '\0' '\n' <"/proc/$(cat pid0)/environ" | sed -n 's/^CANDLE_DDP_SECRET=//p')" ||
        fail "the secret is on a command line: $process"
done
kill -TERM $launcher
gone "SIGTERM"
wait $launcher || true
start
kill -KILL $launcher
gone "ddprun is killed"
wait $launcher 2>/dev/null || true
start
kill -KILL "$(pgrep -P $launcher | tail -1)"
gone "a connection is killed"
wait $launcher || true
