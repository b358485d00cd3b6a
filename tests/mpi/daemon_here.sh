#!/bin/sh
# daemon_here.sh HOST COMMAND...: stands in for ssh under mpirun: starts HOST's daemon on this very machine. With a folder for temporary
# files of its own, the ranks of one HOST share no memory with those of another and reach them over TCP, as on two machines.
host=$1
shift
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/$host.XXXXXX") || exit 1
OMPI_MCA_btl_vader_backing_directory=$TMPDIR
export TMPDIR OMPI_MCA_btl_vader_backing_directory
/bin/sh -c "$*"
status=$?
rm -rf "$TMPDIR"
exit $status
