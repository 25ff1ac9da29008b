#!/usr/bin/env bash
# Checks that a program needs only functions that NCCL 2.18, the oldest supported version, has: with a missing function, the
# dynamic loader would refuse to start the program.
#
#     scripts/nccl_symbols.sh PROGRAM
set -euo pipefail
allowed='ncclAllGather ncclAllReduce ncclBroadcast ncclCommAbort ncclCommDestroy ncclCommFinalize ncclCommGetAsyncError
ncclCommInitRankConfig ncclCommSplit ncclGetErrorString ncclGetLastError ncclGetUniqueId ncclGetVersion ncclGroupEnd
ncclGroupStart ncclRecv ncclReduce ncclReduceScatter ncclSend'
used=$(nm --dynamic --undefined-only "${1:?usage: nccl_symbols.sh PROGRAM}" | grep -oE '\bp?nccl[A-Za-z]+' | sort -u || true)
[ -n "$used" ] || { echo "error: $1 is not linked with NCCL" >&2; exit 1; }
for symbol in $used; do
  grep -qw "$symbol" <<<"$allowed" || { echo "error: $1 needs $symbol, which old versions of NCCL lack" >&2; exit 1; }
done
echo "$1 needs" $used
