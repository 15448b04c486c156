#!/usr/bin/env bash
# Under mpirun: the same numbers as ranks in one process, refusal of ranks that were started differently, and an end
# for all when one is killed.
source "$(dirname "$0")/lib.sh" "$@"
has_mpirun || skip "no mpirun, or tagc built without MPI"
make_data
# MPI keeps memory until the process ends; our own leaks show in the tests without it.
export ASAN_OPTIONS=detect_leaks=0

options=("${tiny[@]}" --steps 6 --batch-size 2 --sparsity 0.9 --save-every 3)
run 0 train "${options[@]}" --ranks 2 --out local
mpi 2 train "${options[@]}" --out mpi >out 2>err || fail "mpirun -n 2 tagc train"
same_losses local mpi
for rank in 0 1; do cmp {local,mpi}/step-00000006/rank-$rank.bin || fail "checkpoints differ"; done

# Started differently.
code=0
timeout 120 mpirun --oversubscribe -n 1 "$tagc" train "${options[@]}" --steps 7 : \
    -n 1 "$tagc" train "${options[@]}" --steps 8 >out 2>err || code=$?
[ $code != 0 ] && [ $code != 124 ] || fail "exit code $code for ranks with different --steps"
grep -qF -e '--steps is "7" on rank 0 and "8" on rank 1' err || fail "the difference is not named"
[ "$(grep -c '^tagc: ' err)" = 1 ] || fail "said more than once"
grep -q MPI_ABORT err out && fail "MPI_ABORT for options on which all ranks agree that they differ"
code=0
mpi 2 train "${options[@]}" --ranks 3 >out 2>err || code=$?
[ $code != 0 ] || fail "--ranks 3 under mpirun -n 2"
grep -q -e '--ranks is 3' err || fail "--ranks is not named"
[ "$(grep -c '^tagc: ' err)" = 1 ] || fail "said more than once"
grep -q MPI_ABORT err && fail "a wrong option needs no MPI_Abort"
run 2 train "${options[@]}" --transport mpi --ranks 2
root=
[ "$(id -u)" = 0 ] && mpirun --version | grep -q "Open MPI" && root=" --allow-run-as-root"
says "start it with mpirun$root -n 2"
code=0
mpi 2 train "${options[@]}" --transport local >out 2>err || code=$?
[ $code != 0 ] || fail "--transport local under mpirun"

# What every rank finds before training ends each rank by itself: one message, exit code 1, no MPI_ABORT.
mpi_refuses() { # <text> <arguments of tagc>...
    local text=$1 code=0
    shift
    mpi 2 "$@" >out 2>err || code=$?
    [ $code = 1 ] || fail "exit code $code instead of 1: mpirun -n 2 tagc $*"
    says "$text"
    ! grep -q MPI_ABORT err out || fail "MPI_ABORT for a mistake that all ranks see: mpirun -n 2 tagc $*"
}
mpi_refuses "nowhere" train "${options[@]}" --data nowhere
mpi_refuses "nowhere" train "${options[@]}" --out nowhere --resume
mpi_refuses "mpi holds a run already" train "${options[@]}" --out mpi
mpi_refuses "which matches no tensor" train "${options[@]}" --compress names --compress-names nothing
mpi_refuses "nowhere" eval --from nowhere --data data
[ ! -e nowhere ] || fail "a refused run made its folder"

# Other data, or another folder, on one rank.
mkdir -p elsewhere shorter
cp data/train.bin shorter/
code=0
timeout 120 mpirun --oversubscribe -n 1 "$tagc" train "${options[@]}" : \
    -n 1 "$tagc" train "${options[@]}" --data shorter >out 2>err || code=$?
[ $code != 0 ] && [ $code != 124 ] || fail "exit code $code for ranks with different data"
grep -q "the data of rank 0 are .* of rank 1" err || fail "the difference in data is not named"
[ "$(grep -c '^tagc: ' err)" = 1 ] || fail "said more than once"
grep -q MPI_ABORT err out && fail "MPI_ABORT for data on which all ranks agree that they differ"
code=0
timeout 120 mpirun --oversubscribe -n 1 "$tagc" train "${options[@]}" --data "$PWD/data" --out here : \
    -n 1 --wdir "$PWD/elsewhere" "$tagc" train "${options[@]}" --data "$PWD/data" --out here >out 2>err || code=$?
[ $code != 0 ] && [ $code != 124 ] || fail "exit code $code for ranks in different folders"
grep -q "rank 1 does not see here/metrics.jsonl" err || fail "the missing folder is not named"

# One rank dies in the middle of a step.
run_killed() {
    timeout 120 mpirun --oversubscribe -n 2 "$tagc" train "${options[@]}" --steps 1000000 --save-every 5 --timeout 20 \
        --out killed >out 2>err &
    local pid=$! victim code=0
    for _ in $(seq 600); do
        ls killed 2>/dev/null | grep -q '^step-' && break
        sleep 0.05
    done
    # timeout runs mpirun, mpirun runs the ranks.
    victim=$(pgrep -P "$(pgrep -P "$pid" | head -n 1)" -x tagc | tail -n 1)
    [ -n "$victim" ] || fail "no rank to kill"
    kill -KILL "$victim"
    wait "$pid" || code=$?
    [ $code != 0 ] && [ $code != 124 ] || fail "exit code $code after a rank was killed" # 124: not noticed within two minutes
    [ -s err ] || [ -s out ] || fail "no message"
}
run_killed
# The last whole checkpoint is good.
last=$(ls -d killed/step-* | tail -n 1)
run 0 eval --from "$last" --data data --batches 1
run 0 train --out killed --resume --steps "$((10#${last##*-} + 2))" --quiet --ranks 2

# A launcher without MPI in the binary's reach is not two separate runs: the environment says so.
code=0
OMPI_COMM_WORLD_SIZE=2 timeout 60 "$tagc" train "${options[@]}" --transport local >out 2>err || code=$?
[ $code = 2 ] || fail "exit code $code for --transport local with a launcher's environment"
