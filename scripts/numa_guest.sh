#!/bin/sh
# Where ranks run and where their shared memory lies on a machine with two NUMA nodes, which QEMU emulates.
#
#     apt-get install qemu-system-x86 busybox-static cpio
#     apt-get download linux-image-6.1.0-50-cloud-amd64 && dpkg -x linux-image-*.deb kernel    # any with CONFIG_NUMA built in
#     scripts/numa_guest.sh kernel/boot/vmlinuz-*
#
# Prints for each rank its processors, and how many pages of the shared memory that it has touched lie on each node: with one
# rank on each node, and with both on node 0. The guest computes as slowly as an emulator does: nothing is timed.
set -eu
kernel=$(readlink -f "$1")
cd "$(dirname "$0")/.."
cargo build --release --locked --quiet -p ddprun -p candle-ddp --bin ddprun --example allreduce
programs=${CARGO_TARGET_DIR:-target}/release
guest=$(mktemp -d)
trap 'rm -rf "$guest"' EXIT
mkdir -p "$guest/root/bin" "$guest/root/proc" "$guest/root/sys" "$guest/root/dev" "$guest/root/tmp"
cp "$(command -v busybox)" "$guest/root/bin/"
for program in ddprun examples/allreduce; do
    strip -o "$guest/root/bin/$(basename $program)" "$programs/$program"
    ldd "$programs/$program" | grep -o '/lib[^ ]*'
done | sort -u | while read -r library; do
    mkdir -p "$guest/root$(dirname "$library")"
    cp -L "$library" "$guest/root$library"
done
cat > "$guest/root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm; mount -t tmpfs shm /dev/shm
ip link set lo up
for node in /sys/devices/system/node/node*; do echo "$(basename $node): processors $(cat $node/cpulist)"; done
run() {
    "$@" /bin/allreduce --sizes 16M --warmup 1 --iters 100000 > /tmp/output 2>&1 &
    # Until both ranks have passed all slots.
    tries=0
    while [ $tries -lt 60 ]; do
        sleep 1; tries=$((tries + 1))
        [ "$(cat /proc/[0-9]*/numa_maps 2> /dev/null | grep -c candle-ddp)" = 2 ] && [ $tries -gt 8 ] && break
    done
    for process in /proc/[0-9]*; do
        grep -q allreduce $process/comm 2> /dev/null || continue
        echo "rank $(tr '\0' '\n' < $process/environ | sed -n 's/^RANK=//p'):" \
            "processors $(sed -n 's/^Cpus_allowed_list:\t//p' $process/status)," \
            "pages $(grep candle-ddp $process/numa_maps | grep -o 'N[0-9]*=[0-9]*' | tr '\n' ' ')"
    done
    killall -9 ddprun allreduce; wait
}
echo "ddprun --nproc-per-node 2 --numa-binding node:"
run ddprun --nproc-per-node 2 --numa-binding node
echo "both ranks on node 0:"
run taskset 3 ddprun --nproc-per-node 2
poweroff -f
INIT
chmod +x "$guest/root/init"
(cd "$guest/root" && find . | cpio --quiet -o -H newc | gzip -1) > "$guest/initrd"
qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 4,sockets=2 -m 2G -nographic -no-reboot \
    -object memory-backend-ram,size=1G,id=memory0 -numa node,nodeid=0,cpus=0-1,memdev=memory0 \
    -object memory-backend-ram,size=1G,id=memory1 -numa node,nodeid=1,cpus=2-3,memdev=memory1 \
    -kernel "$kernel" -initrd "$guest/initrd" -append "console=ttyS0 quiet panic=-1" < /dev/null |
    tr -d '\r' | grep -oE '(node[0-9]|rank|ddprun|both).*'
